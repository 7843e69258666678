"""Latent attention: operands of the matrix instructions stay in registers, turned there, and nothing is spilt; for many
heads they are a warpgroup's, with one wait for the scores and one for the sums.
"""

from __future__ import annotations

from compiled.kernels import (
    ADA,
    AMPERE,
    HOPPER,
    MATRIX_BF16,
    WARPGROUP_MATRIX,
    WARPGROUP_WAIT,
    WIDE_COPY,
    WIDE_LOAD,
    CudaKernel,
    TritonKernel,
)

from deepseek_tgi.kernels.latent_attention.decode import (
    CUTS,
    MODES,
    combine_spec,
    decode_spec,
    queries_spec,
    values_spec,
    wide_spec,
)
from deepseek_tgi.kernels.latent_attention.expanded import HOPPER_TILE, TILE, tile_constants, unpack_spec
from deepseek_tgi.kernels.latent_layer.cuda import ready_spec

MATRIX = {"bfloat16": MATRIX_BF16}
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
    CudaKernel(queries_spec(128), 96, (WIDE_COPY, MATRIX_BF16, r"LDSM\.16\.MT88\.4")),
    CudaKernel(values_spec(128, 128), 96, (WIDE_LOAD, MATRIX_BF16), ahead=8),
    CudaKernel(ready_spec("int8", 16, 128), 96, (WIDE_COPY, MATRIX_BF16)),
    *(CudaKernel(unpack_spec(mode, 16), 80, (WIDE_LOAD, r"STG\.E\.128.*")) for mode in MODES),
]  # fmt: skip


def expanded(tile: dict[str, int], arch: str, must: str) -> TritonKernel:
    """The kernel over expanded keys, its tile cut for `arch`."""
    pointers = ("q", "rope", "made", "out")
    types = dict.fromkeys(pointers, "*bf16") | {"scale": "fp32"}
    types |= dict.fromkeys(("q_stride", "made_stride", "out_stride", "tokens", "ahead"), "i32")
    return TritonKernel(
        "deepseek_tgi.kernels.latent_attention.expanded_kernel:expanded_tile", types,
        tile_constants(64, 128, 128) | {"BM": tile["BM"], "BN": tile["BN"], "UPCAST": False}, 255, (WIDE_COPY, must),
        divisible=(*pointers, "q_stride", "made_stride", "out_stride"), num_warps=tile["num_warps"],
        num_stages=tile["num_stages"], archs=(arch,),
    )  # fmt: skip


TRITON = [
    expanded(HOPPER_TILE, HOPPER, WARPGROUP_MATRIX),
    expanded(TILE, AMPERE, MATRIX_BF16),
    expanded(TILE, ADA, MATRIX_BF16),
]
