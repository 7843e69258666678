"""The write of heads into pages: small, and in no one's way."""

from __future__ import annotations

from compiled.kernels import CudaKernel

from deepseek_tgi.kernels.cuda.heads import STORED_MODES, write_spec

CUDA = [
    CudaKernel(write_spec(mode, 128, 128, 16, x_bf16=True), 64, (r"SHFL.*",) if mode in ("int8", "fp8_e4m3fn") else ())
    for mode in STORED_MODES
]
