"""The kernel for few rows (`cuda/sources/int4_stream.cu`): its shapes, what they need, its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.cuda.program import KernelSpec, spec
from deepseek_tgi.kernels.int4_linear.layout import CHUNK, CudaInt4

SOURCE = "int4_stream"
SIGNATURE = "ppplpppiiiii"
MAX_ROWS = 32
_SHARED_LIMIT = {90: 232_448, 80: 166_912}


@dataclass(frozen=True, slots=True)
class StreamShape:
    """One way to cut the work; see the source. `blocks` is the number of blocks for each multiprocessor."""

    row_tiles: int = 1
    split: int = 4
    depth: int = 6
    cluster: int = 1
    warps: int = 8
    blocks: int = 1

    def __post_init__(self) -> None:
        assert self.warps % self.split == 0, f"{self}: warps are not whole columns"
        assert self.depth >= 2, f"{self}: a queue has at least two places"


@dataclass(frozen=True, slots=True)
class StreamCall:
    """What decides the compiled kernel beside its shape."""

    group: int
    scale_kind: int
    x_bf16: bool
    out_bf16: bool
    silu: bool = False


def shared_bytes(shape: StreamShape, call: StreamCall, rows: int, stages: int) -> int:
    """Dynamic shared memory of a block for `rows` rows of x and a weight of `stages` stages along K."""
    stage_k = max(call.group, CHUNK)
    group_bytes = 64 if call.scale_kind else 128
    queue = shape.depth * shape.row_tiles * (stage_k // CHUNK * 512 + stage_k // call.group * group_bytes)
    sums = shape.row_tiles * tokens(rows) * 512
    most_stages = -(-stages // shape.cluster)
    return shape.warps * (queue + sums) + rows * most_stages * stage_k * 2


def tokens(rows: int) -> int:
    """Eights of rows the kernel is compiled for: 1, 2, 3 or 4."""
    return -(-rows // 8)


def stages_of(w: CudaInt4) -> int:
    """Stages along K."""
    return w.chunks * CHUNK // max(w.group, CHUNK)


def fits(shape: StreamShape, rows: int, w: CudaInt4, capability: int) -> bool:
    """Whether a block of `shape` has the shared memory and K enough for its parts."""
    if shape.cluster > 1 and capability < 90:
        return False
    call = StreamCall(w.group, w.scale_kind, True, True)
    limit = _SHARED_LIMIT[90 if capability >= 90 else 80]
    return shared_bytes(shape, call, rows, stages_of(w)) <= limit and stages_of(w) >= shape.cluster


def default_shapes(w: CudaInt4, rows: int, multiprocessors: int) -> tuple[StreamShape, ...]:
    """Shapes in the order to try, for a weight nobody has measured."""
    tiles = w.codes.shape[0]
    if tiles >= 8 * multiprocessors:
        first = StreamShape(row_tiles=1 if rows <= 8 else 2, split=1, depth=8, warps=14)
    else:
        first = StreamShape(split=8, depth=8, warps=16)
    return (first, StreamShape(split=4, depth=4, cluster=2), StreamShape(split=4, depth=4, cluster=8))


def stream_spec(shape: StreamShape, call: StreamCall, rows: int, stages: int) -> KernelSpec:
    """The kernel of `shape` for `rows` rows. Shared memory is asked for the most rows of the same eight."""
    return spec(
        SOURCE,
        SOURCE,
        SIGNATURE,
        shared_bytes(shape, call, rows, stages),
        TOKENS=tokens(rows),
        ROW_TILES=shape.row_tiles,
        SPLIT=shape.split,
        DEPTH=shape.depth,
        GROUP=call.group,
        CLUSTER=shape.cluster,
        THREADS=shape.warps * 32,
        SCALE_KIND=call.scale_kind,
        X_BF16=int(call.x_bf16),
        OUT_BF16=int(call.out_bf16),
        SILU=int(call.silu),
    )


def launch(
    machine: Machine,
    shape: StreamShape,
    x: torch.Tensor,
    w: CudaInt4,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
) -> None:
    """Enqueue `out = x w^T + bias + residual` for at most `MAX_ROWS` rows, each dense and aligned to 16 bytes."""
    rows = x.shape[0]
    call = StreamCall(w.group, w.scale_kind, x.dtype == torch.bfloat16, out.dtype == torch.bfloat16, silu)
    stages = stages_of(w)
    kernel = machine.programs.kernel(stream_spec(shape, call, rows, stages))
    units = w.codes.shape[0] // shape.row_tiles
    wide = max(1, min(units, machine.multiprocessors * shape.blocks // shape.cluster))
    arguments = (
        w.codes, w.metas, x, x.stride(0), bias, residual, out, rows, w.out_features, w.in_features, units, stages,
    )  # fmt: skip
    kernel((wide, shape.cluster, 1), shape.warps * 32, arguments, overlap=True)
