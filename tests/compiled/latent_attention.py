"""Latent attention: operands of the matrix instructions stay in registers, turned there, and nothing is spilt; for many
heads they are a warpgroup's, with one wait for the scores and one for the sums.
"""

from __future__ import annotations

from compiled.kernels import HOPPER, WARPGROUP_MATRIX, WARPGROUP_WAIT, WIDE_COPY, WIDE_LOAD, CudaKernel

from deepseek_tgi.kernels.latent_attention.decode import (
    CUTS,
    MODES,
    absorb_spec,
    combine_spec,
    decode_spec,
    wide_spec,
)
from deepseek_tgi.kernels.latent_attention.expanded import unpack_spec

MATRIX = {"bfloat16": r"HMMA\.16816\.F32\.BF16"}
OWN = {"bfloat16": r"LDSM\.16\.MT88\.4", "float16": r"LDSM\.16\.MT88\.4"}
CUDA = [
    *(
        CudaKernel(
            decode_spec(mode, 16, CUTS[mode]), 255,
            (WIDE_COPY, MATRIX.get(mode, r"HMMA\.16816\.F32"), OWN.get(mode, r"MOVM\.16\.MT88")),
        )
        for mode in MODES
    ),
    *(
        CudaKernel(wide_spec(mode, 16), 168, (WARPGROUP_MATRIX,), archs=(HOPPER,), at_most=((WARPGROUP_WAIT, 2),))
        for mode in MODES
    ),
    CudaKernel(combine_spec("int8", CUTS["int8"], 16, 2), 64, archs=(HOPPER,)),
    CudaKernel(combine_spec("int8", CUTS["int8"], 16, 8, 128), 64),
    CudaKernel(absorb_spec(128, 1), 128),
    *(CudaKernel(unpack_spec(mode, 16), 80, (WIDE_LOAD, r"STG\.E\.128.*")) for mode in MODES),
]  # fmt: skip
