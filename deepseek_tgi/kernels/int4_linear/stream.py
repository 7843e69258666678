"""The kernel for few rows (`cuda/sources/int4_stream.cu`): its shapes, what they need, its launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from deepseek_tgi.kernels.cuda.machine import Machine, shared_limit
from deepseek_tgi.kernels.cuda.program import KernelSpec, spec
from deepseek_tgi.kernels.int4_linear.layout import CHUNK, CudaInt4

SOURCE = "int4_stream"
SIGNATURE = "ppplpppiiiiipf"
MAX_ROWS = 32
_PAIR_BYTES = 115_000
_ROWS_ALONE, _MOST_ROWS_ALONE = 8, 16
"""Up to so many rows warps multiply alone; up to so many they may, two tiles each."""
_LEAST_STAGES = 2
_MOST_WARPS = 32
_MOST_CANDIDATES = 24
_CLUSTER_RATING = {1: 1.0, 2: 0.95, 4: 0.8, 8: 0.75}


@dataclass(frozen=True, slots=True)
class StreamShape:
    """One way to cut the work; see the source. `blocks` counts blocks for each multiprocessor.

    With `together` warps multiply four by four; `split` then counts fours, and `row_tiles` is 1.
    """

    row_tiles: int = 1
    split: int = 4
    depth: int = 6
    cluster: int = 1
    warps: int = 8
    blocks: int = 1
    together: int = 0

    def __post_init__(self) -> None:
        assert min(self.row_tiles, self.split, self.warps, self.blocks) > 0, f"{self}: there is nothing to do"
        assert self.warps <= _MOST_WARPS, f"{self}: a block has not so many"
        assert self.cluster in _CLUSTER_RATING, f"{self}: there are no such clusters"
        assert self.warps % (self.team * self.split) == 0, f"{self}: warps are not whole columns"
        assert self.row_tiles == 1 or not self.together, f"{self}: four warps take four tiles"
        assert self.depth >= 2, f"{self}: a queue has at least two places"

    @property
    def team(self) -> int:
        """Warps that multiply together."""
        return 4 if self.together else 1


@dataclass(frozen=True, slots=True)
class StreamCall:
    """What decides the compiled kernel beside its shape."""

    group: int
    scale_kind: int
    x_bf16: bool
    out_bf16: bool
    silu: bool = False
    norm: bool = False


def shared_bytes(shape: StreamShape, call: StreamCall, rows: int, stages: int) -> int:
    """Dynamic shared memory of a block for `rows` rows of x and a weight of `stages` stages along K."""
    stage_k = max(call.group, CHUNK)
    group_bytes = 64 if call.scale_kind else 128
    queue = shape.depth * shape.row_tiles * (stage_k // CHUNK * 512 + stage_k // call.group * group_bytes)
    sums = shape.row_tiles * tokens(shape, rows) * 512
    most_stages = -(-stages // shape.cluster)
    group_sums = most_stages * (stage_k // call.group) * tokens(shape, rows) * 32
    lines = tokens(shape, rows) * 8 if shape.together else rows
    factors = (tokens(shape, rows) * 8 + rows * shape.warps) * 4 if call.norm else 0
    return shape.warps * (queue + sums) + lines * most_stages * stage_k * 2 + group_sums + factors


def tokens(shape: StreamShape, rows: int) -> int:
    """Eights of rows the kernel is compiled for."""
    eights = -(-rows // 8)
    return eights if not shape.together else 2 if eights <= 2 else 4


def stages_of(w: CudaInt4) -> int:
    """Stages along K."""
    return w.chunks * CHUNK // max(w.group, CHUNK)


def fits(shape: StreamShape, rows: int, w: CudaInt4, capability: int) -> bool:
    """Whether a block of `shape` has the shared memory, also for a norm, and K enough for its parts."""
    if (shape.cluster > 1 and capability < 90) or (shape.together and capability != 90):
        return False
    call = StreamCall(w.group, w.scale_kind, True, True, norm=True)
    room = shared_bytes(shape, call, rows, stages_of(w))
    return room <= shared_limit(capability) and stages_of(w) >= shape.cluster


def candidates(w: CudaInt4, rows: int, multiprocessors: int, capability: int) -> list[StreamShape]:
    """Shapes worth measuring, likeliest first: those that fill the device evenly with enough bytes asked for ahead."""
    rated: list[tuple[float, int, StreamShape]] = []
    for shape in _cuts(rows):
        rating = _rating(shape, w, rows, multiprocessors) if fits(shape, rows, w, capability) else 0.0
        if rating > 0:
            rated.append((rating, len(rated), shape))
    rated.sort(key=lambda each: (-each[0], each[1]))
    return [shape for _, _, shape in rated[:_MOST_CANDIDATES]]


def _cuts(rows: int) -> Iterator[StreamShape]:
    """All cuts that make sense for `rows` rows, whatever the weight."""
    for cluster, warps, split, depth in product((1, 2, 4, 8), (16, 12, 8), (1, 2, 4, 8), (4, 5, 6, 3)):
        if rows <= _MOST_ROWS_ALONE and warps % split == 0:
            for row_tiles in (1, 2) if rows <= _ROWS_ALONE else (2,):
                yield StreamShape(row_tiles, split, depth, cluster, warps)
        if rows > _ROWS_ALONE and warps % (split * 4) == 0:
            yield StreamShape(1, split, depth, cluster, warps, together=1)


def _rating(shape: StreamShape, w: CudaInt4, rows: int, multiprocessors: int) -> float:
    """How well a shape should do; 0 if it is not worth trying. Weighs what measurements showed, no more."""
    stages, units = stages_of(w), w.codes.shape[0] // (shape.row_tiles * shape.team)
    own = stages / shape.cluster / shape.split
    if own < _LEAST_STAGES and shape.cluster * shape.split > 1:
        return 0.0
    call = StreamCall(w.group, w.scale_kind, x_bf16=True, out_bf16=True)
    room = shared_bytes(shape, call, rows, stages)
    wide = clusters_at_once(multiprocessors, shape.cluster)
    columns = shape.warps // shape.team // shape.split
    rounds = math.ceil(math.ceil(units / wide) / columns)
    even = units / (min(wide, units) * rounds * columns) * min(wide, units) / wide
    ahead = shape.warps * min(shape.depth - 1, own * rounds) * shape.row_tiles
    pair = 1.0 if room <= _PAIR_BYTES else 0.85  # else the next kernel's block finds no room beside this one's
    return float(even * min(1.0, ahead / 56) ** 0.5 * pair * 0.97 ** (rounds - 1) * _CLUSTER_RATING[shape.cluster])


def clusters_at_once(multiprocessors: int, cluster: int) -> int:
    """Clusters that run at the same time, a block a multiprocessor.

    Multiprocessors come in lots that a cluster of 4 or more does not fill: an H200 of 132 takes 30 of 4 or 15 of 8.
    """
    return max(1, multiprocessors // cluster if cluster <= 2 else multiprocessors * 10 // (cluster * 11))


def stream_spec(shape: StreamShape, call: StreamCall, rows: int, stages: int) -> KernelSpec:
    """The kernel of `shape` for `rows` rows. Shared memory is asked for the most rows of the same eight."""
    return spec(
        SOURCE,
        SOURCE,
        SIGNATURE,
        shared_bytes(shape, call, rows, stages),
        TOKENS=tokens(shape, rows),
        ROW_TILES=shape.row_tiles,
        SPLIT=shape.split,
        DEPTH=shape.depth,
        GROUP=call.group,
        CLUSTER=shape.cluster,
        WARPGROUP=shape.together,
        THREADS=shape.warps * 32,
        SCALE_KIND=call.scale_kind,
        X_BF16=int(call.x_bf16),
        OUT_BF16=int(call.out_bf16),
        SILU=int(call.silu),
        NORM=int(call.norm),
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
    norm: tuple[torch.Tensor, float] | None = None,
) -> None:
    """Enqueue `out = x w^T + bias + residual` for at most `MAX_ROWS` rows, each dense and aligned to 16 bytes.

    With `silu` x is gate and up side by side; with `norm` (weight, epsilon) the RMS norm of a float32 x is multiplied.
    """
    rows = x.shape[0]
    x_bf16, out_bf16 = x.dtype == torch.bfloat16, out.dtype == torch.bfloat16
    call = StreamCall(w.group, w.scale_kind, x_bf16, out_bf16, silu, norm is not None)
    norm_weight, eps = norm or (None, 0.0)
    stages = stages_of(w)
    kernel = machine.programs.kernel(stream_spec(shape, call, rows, stages))
    units = w.codes.shape[0] // (shape.row_tiles * shape.team)
    wide = min(units, clusters_at_once(machine.multiprocessors, shape.cluster) * shape.blocks)
    arguments = (
        w.codes, w.metas, x, x.stride(0), bias, residual, out, rows, w.out_features, w.in_features, units, stages,
        norm_weight, eps,
    )  # fmt: skip
    kernel((wide, shape.cluster, 1), shape.warps * 32, arguments, overlap=True)
