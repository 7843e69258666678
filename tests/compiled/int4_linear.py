"""INT4 linear: the kernel for few rows streams in 16-byte copies and multiplies in bfloat16 matrix instructions."""

from __future__ import annotations

from compiled.kernels import MATRIX_BF16, WIDE_COPY, CudaKernel

from deepseek_tgi.kernels.cuda.program import spec
from deepseek_tgi.kernels.int4_linear import dequantised
from deepseek_tgi.kernels.int4_linear.stream import StreamCall, StreamShape, stream_spec

CALL = StreamCall(group=128, scale_kind=1, x_bf16=True, out_bf16=True)
MUST = (WIDE_COPY, MATRIX_BF16, r"LDSM\.16\.M88\.4", r"HFMA2\.BF16.*")
ONE = StreamShape(split=8, depth=8, warps=16)

CUDA = [
    CudaKernel(stream_spec(ONE, CALL, rows=1, stages=32), 64, MUST),
    CudaKernel(
        stream_spec(StreamShape(row_tiles=2, split=4, depth=4, cluster=4), CALL, rows=32, stages=32),
        168,
        (*MUST, r"UCGABAR.*"),
        archs=("sm_90a",),
    ),
    CudaKernel(
        spec(
            dequantised.SOURCE, dequantised.SOURCE, dequantised.SIGNATURE,
            GROUP=128, SCALE_KIND=1, OUT_BF16=1, THREADS=128,
        ),
        64,
        (r"STG\.E\.128",),
    ),
]  # fmt: skip
