"""The kernel for many rows that the copy engine feeds (`cuda/sources/int4_wide.cu`, sm_90): its shapes, its launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.cuda.program import KernelSpec, Tiles, spec
from deepseek_tgi.kernels.int4_linear.layout import CHUNK, TILE_ROWS, CudaInt4
from deepseek_tgi.kernels.int4_linear.stream import clusters_at_once

SOURCE = "int4_wide"
SIGNATURE = "tttpppiiiiii"
LEAST_ROWS = 129
"""For fewer, `panel` is as fast or faster."""
MOST_ROWS = 1024
"""Beyond this, a weight nobody has measured is dequantised and multiplied by torch."""
_WARPGROUPS = {16: (1, 2, 3, 4), 32: (1, 2, 3, 4), 64: (1, 2, 3, 4), 128: (1, 2, 3), 256: (2,)}
"""By tokens: more would leave a thread too few registers for its sums."""
_CLUSTERS = (1, 2, 4)
_SHARED_LIMIT, _MULTIPROCESSOR_BYTES, _BLOCK_BYTES = 232_448, 233_472, 1024
_OTHER_REGISTERS, _COPYING_REGISTERS = 76, 32
"""Of a thread that multiplies, beside its sums; of one that does not."""
_WARPGROUP_ROWS = 64
_ROUND_TOKENS = 32
_MOST_CANDIDATES = 8
_STAGE_CYCLES, _START_CYCLES, _WRITE_CYCLES = 300, 3000, 8
"""As measured: what a stage takes beside its products, starting a block, and writing a token of a warpgroup."""


@dataclass(frozen=True, slots=True)
class WideShape:
    """One way to cut the work; see the source."""

    tokens: int = 256
    warpgroups: int = 2
    stages: int = 5
    cluster: int = 1

    def __post_init__(self) -> None:
        assert self.warpgroups in _WARPGROUPS.get(self.tokens, ()), f"{self}: no such width, or too many sums"
        assert self.stages >= 3, f"{self}: one stage is multiplied, the next one is read, one is filled"


def shared_bytes(shape: WideShape, group: int, scale_kind: int) -> int:
    """Dynamic shared memory of a block: its stages, room for sums, two signals a stage. See the source."""
    metas = max(1, CHUNK // group) * (64 if scale_kind else 128)
    stages = shape.stages * (shape.tokens * CHUNK * 2 + shape.warpgroups * 4 * (512 + metas))
    if shape.cluster > 1:
        room = max(stages, shape.tokens * (shape.warpgroups * _WARPGROUP_ROWS + 4) * 4)
    else:
        room = stages + shape.warpgroups * min(shape.tokens, _ROUND_TOKENS) * (_WARPGROUP_ROWS + 4) * 4
    return room + shape.stages * 16


def blocks(shape: WideShape, group: int, scale_kind: int) -> int:
    """Blocks that a multiprocessor has registers and shared memory for."""
    each = (shape.tokens // 2 + _OTHER_REGISTERS) * shape.warpgroups + _COPYING_REGISTERS
    room = _MULTIPROCESSOR_BYTES // (shared_bytes(shape, group, scale_kind) + _BLOCK_BYTES)
    return max(1, min(65536 // (each * 128), room))


def fits(shape: WideShape, w: CudaInt4, capability: int) -> bool:
    """Whether `shape` can run."""
    return capability == 90 and _fits(shape, w)


def default_shapes(w: CudaInt4, rows: int, multiprocessors: int) -> tuple[WideShape, ...]:
    """Shapes in the order to try, for a weight nobody has measured; none where another kernel is thought faster."""
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        return ()
    return tuple(sorted(_sensible(w), key=lambda shape: _load(shape, w, rows, multiprocessors)))


def candidates(w: CudaInt4, rows: int, multiprocessors: int) -> list[WideShape]:
    """Shapes worth measuring, the likely ones first."""
    if rows < LEAST_ROWS:
        return []
    return sorted(_sensible(w), key=lambda shape: _load(shape, w, rows, multiprocessors))[:_MOST_CANDIDATES]


def _sensible(w: CudaInt4) -> list[WideShape]:
    shapes = []
    for tokens, cluster in product((256, 128), _CLUSTERS):
        for warpgroups in _WARPGROUPS[tokens]:
            fitting = (WideShape(tokens, warpgroups, stages, cluster) for stages in (6, 5, 4))
            shapes += [shape for shape in fitting if _fits(shape, w)][:1]
    return shapes


def _load(shape: WideShape, w: CudaInt4, rows: int, multiprocessors: int) -> float:
    """Cycles of the busiest multiprocessor: its stages, starting and writing."""
    pieces = -(-rows // shape.tokens) * _across(shape, w)
    wide = clusters_at_once(multiprocessors, shape.cluster)
    together = min(blocks(shape, w.group, w.scale_kind), -(-pieces // wide))
    rounds = -(-pieces // (wide * together))
    stage = (2 * shape.tokens * shape.warpgroups + _STAGE_CYCLES) * together
    ends = _START_CYCLES + shape.tokens * shape.warpgroups * shape.cluster * _WRITE_CYCLES
    return rounds * (w.chunks / shape.cluster * stage + ends)


def _across(shape: WideShape, w: CudaInt4) -> int:
    return -(-w.codes.shape[0] * TILE_ROWS // (shape.warpgroups * _WARPGROUP_ROWS))


def _fits(shape: WideShape, w: CudaInt4) -> bool:
    wholes = w.chunks * CHUNK // max(w.group, CHUNK)  # what a block of a cluster takes at least one of
    return shared_bytes(shape, w.group, w.scale_kind) <= _SHARED_LIMIT and wholes >= shape.cluster


def wide_spec(shape: WideShape, group: int, scale_kind: int, out_bf16: bool) -> KernelSpec:
    """The kernel of `shape`."""
    return spec(
        SOURCE,
        SOURCE,
        SIGNATURE,
        shared_bytes(shape, group, scale_kind),
        TOKENS=shape.tokens,
        WARPGROUPS=shape.warpgroups,
        STAGES=shape.stages,
        BLOCKS=blocks(shape, group, scale_kind),
        GROUP=group,
        SCALE_KIND=scale_kind,
        CLUSTER=shape.cluster,
        OUT_BF16=int(out_bf16),
    )


def launch(
    machine: Machine,
    shape: WideShape,
    x: torch.Tensor,
    w: CudaInt4,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Enqueue `out = x w^T + bias + residual`, x in bfloat16, its rows dense and aligned to 16 bytes."""
    kernel = machine.programs.kernel(wide_spec(shape, w.group, w.scale_kind, out.dtype == torch.bfloat16))
    rows, tiles = x.shape[0], shape.warpgroups * _WARPGROUP_ROWS // TILE_ROWS
    aligned = w.out_features % 8 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in (out, residual))
    panels = -(-rows // shape.tokens)
    pieces = panels * _across(shape, w)
    codes, metas = w.codes.flatten(2), w.metas.flatten(2)
    arguments = (
        Tiles(x, (shape.tokens, CHUNK)),
        Tiles(codes, (tiles, 1, codes.shape[2])),
        Tiles(metas, (tiles, max(1, CHUNK // w.group), metas.shape[2])),
        bias, residual, out, rows, w.out_features, w.chunks, panels, pieces, int(aligned),
    )  # fmt: skip
    at_once = machine.multiprocessors * blocks(shape, w.group, w.scale_kind)
    wide = pieces if shape.cluster > 1 else min(pieces, at_once)
    kernel((wide, shape.cluster, 1), (shape.warpgroups + 1) * 128, arguments, overlap=True)
