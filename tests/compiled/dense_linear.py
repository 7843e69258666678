"""Dense linear: the kernel for exact weights reads them 16 bytes at a time and adds in float32."""

from __future__ import annotations

from compiled.kernels import WIDE_LOAD, CudaKernel

from deepseek_tgi.kernels.cuda.program import spec

CUDA = [
    CudaKernel(
        spec("dense_rows", "dense_rows", "plppppiii", TOKENS=4, THREADS=256, X_BF16=0, OUT_BF16=0),
        64,
        (WIDE_LOAD, "FFMA"),
        must_not=(r"HMMA.*",),
    )
]
