"""INT4 linear: the kernel for few rows streams in 16-byte copies and multiplies in bfloat16 matrix instructions; the
one for many multiplies in a warpgroup's, and has no wait for each, which the compiler puts in where it cannot follow.
"""

from __future__ import annotations

from compiled.kernels import HOPPER, MATRIX_BF16, WARPGROUP_MATRIX, WARPGROUP_WAIT, WIDE_COPY, CudaKernel

from deepseek_tgi.kernels.int4_linear import dequantised
from deepseek_tgi.kernels.int4_linear.panel import PanelShape, panel_spec
from deepseek_tgi.kernels.int4_linear.stream import StreamCall, StreamShape, stream_spec
from deepseek_tgi.kernels.int4_linear.wide import WideShape, wide_spec

CALL = StreamCall(group=128, scale_kind=1, x_bf16=True, out_bf16=True)
FENCE_OF_ALL = r"MEMBAR.*GPU"
"""Half a microsecond; where blocks of a cluster meet, shared memory is all that counts."""
MUST = (WIDE_COPY, MATRIX_BF16, r"LDSM\.16\.M88\.4")


def panel(tokens: int, warpgroups: int, stages: int, registers: int) -> CudaKernel:
    """The kernel for many rows; two waits beside the loop's and the odd stage's."""
    spec = panel_spec(PanelShape(tokens, warpgroups, stages), group=128, scale_kind=1, out_bf16=True)
    must = (WIDE_COPY, WARPGROUP_MATRIX, r"HFMA2\.BF16.*")
    return CudaKernel(spec, registers, must, archs=(HOPPER,), at_most=((WARPGROUP_WAIT, 5),))


def wide(shape: WideShape, registers: int, waits: int) -> CudaKernel:
    """The kernel for many rows that the copy engine feeds."""
    panel = r"UTMALDG\.2D" if shape.sharers == 1 else r"UTMALDG\.2D\.MULTICAST"
    must = (WARPGROUP_MATRIX, panel, r"UTMALDG\.3D", r"USETMAXREG.*", r"HFMA2\.BF16.*")
    spec = wide_spec(shape, group=128, scale_kind=1, out_bf16=True)
    return CudaKernel(
        spec, registers, must, archs=(HOPPER,), must_not=(FENCE_OF_ALL,), at_most=((WARPGROUP_WAIT, waits),)
    )


CUDA = [
    CudaKernel(stream_spec(StreamShape(split=8, depth=5, warps=16), CALL, rows=1, stages=32), 64, MUST),
    CudaKernel(
        stream_spec(StreamShape(row_tiles=2, split=4, depth=3, cluster=2, warps=16), CALL, rows=16, stages=32),
        128,
        (*MUST, r"UCGABAR.*"),
        archs=(HOPPER,),
        must_not=(FENCE_OF_ALL,),
    ),
    CudaKernel(
        stream_spec(StreamShape(split=2, depth=3, cluster=2, warps=16, together=1), CALL, rows=32, stages=32),
        128,
        (WIDE_COPY, WARPGROUP_MATRIX),
        archs=(HOPPER,),
        must_not=(FENCE_OF_ALL,),
    ),
    CudaKernel(
        dequantised.dequantise_spec(group=128, scale_kind=1, out_bf16=True),
        64,
        (r"STG\.E\.128", r"LDG\.E\.64.*"),
    ),
    panel(tokens=64, warpgroups=2, stages=6, registers=128),
    panel(tokens=256, warpgroups=2, stages=4, registers=224),
    # A wait for each of two steps, and one behind them; of exact products one more where a group ends.
    wide(WideShape(128, 3, 8, cluster=2), registers=128, waits=3),
    wide(WideShape(256, 2, 5, sharers=2), registers=168, waits=3),
    wide(WideShape(64, 4, 10), registers=96, waits=4),
    wide(WideShape(64, 1, 6, cluster=4), registers=80, waits=4),
]  # fmt: skip
