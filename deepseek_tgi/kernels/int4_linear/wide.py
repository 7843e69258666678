"""The kernel for many rows that the copy engine feeds (`cuda/sources/int4_wide.cu`, sm_90): its shapes, its launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from deepseek_tgi.kernels.cuda.machine import Machine, shared_limit
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec, Tiles, spec
from deepseek_tgi.kernels.int4_linear.layout import CHUNK, TILE_ROWS, CudaInt4
from deepseek_tgi.kernels.int4_linear.stream import clusters_at_once

SOURCE = "int4_wide"
SIGNATURE = "tttpppiiiiii"
LEAST_ROWS = 33
"""For fewer, `stream` is faster."""
MOST_ROWS = 2048
"""Beyond this, a weight nobody has measured is dequantised and multiplied by torch."""
_WARPGROUPS = {16: (1, 2, 3, 4), 32: (1, 2, 3, 4), 64: (1, 2, 3, 4), 128: (1, 2, 3), 256: (2,)}
"""By tokens: more would leave a thread too few registers for its sums."""
_CLUSTERS = (1, 2, 4, 8)
_STAGES = (12, 10, 8, 6, 5, 4)
_SHARED_LIMIT, _MULTIPROCESSOR_BYTES, _BLOCK_BYTES = shared_limit(90), 228 << 10, 1024
_COPYING_REGISTERS = 32
"""Of a thread that does not multiply."""
_WARPGROUP_ROWS = 64
_ROUND_TOKENS = 32
_MOST_CANDIDATES = 8
_EVERY_PIECE = 1 << 31
"""Of those whose blocks take one each."""
_STAGE_CYCLES, _LEAST_STAGE_CYCLES, _SHARED_STAGE = 130, 700, 0.95
_START_CYCLES, _WRITE_CYCLES = 5000, 6
"""As measured: what a warpgroup's stage takes beside its products, the least a stage takes, and how much of it where
blocks share their panel; starting a block, and writing a token of a warpgroup."""


@dataclass(frozen=True, slots=True)
class WideShape:
    """One way to cut the work; see the source."""

    tokens: int = 256
    warpgroups: int = 2
    stages: int = 5
    cluster: int = 1
    sharers: int = 1

    def __post_init__(self) -> None:
        assert self.cluster in _CLUSTERS, f"{self}: no such cluster"
        assert self.sharers in _CLUSTERS, f"{self}: no such number of sharers"
        assert self.cluster * self.sharers <= 8, f"{self}: no cluster has more blocks everywhere"
        assert self.tokens % (self.sharers * 8) == 0, f"{self}: a part of a panel is whole lots of eight lines"
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
    room = _MULTIPROCESSOR_BYTES // (shared_bytes(shape, group, scale_kind) + _BLOCK_BYTES)
    needed = max(shape.tokens + 48, 80) if shape.tokens <= 64 and group >= CHUNK else shape.tokens // 2 + 76
    return next((count for count in (4, 3, 2) if count <= room and _registers(shape, count) >= needed), 1)


def _registers(shape: WideShape, count: int) -> int:
    """Of a thread that multiplies, where `count` blocks share a multiprocessor; as the source has it."""
    even = min(65536 // count // ((shape.warpgroups + 1) * 128) // 8 * 8, 240)
    return (even * (shape.warpgroups + 1) - _COPYING_REGISTERS) // shape.warpgroups // 8 * 8


def fits(shape: WideShape, w: CudaInt4, capability: int) -> bool:
    """Whether `shape` can run."""
    return capability == 90 and _fits(shape, w)


def default_shapes(w: CudaInt4, rows: int, multiprocessors: int) -> tuple[WideShape, ...]:
    """Shapes in the order to try, for a weight nobody has measured; none where another kernel is thought faster."""
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        return ()
    return tuple(sorted(_sensible(w, rows), key=lambda shape: _load(shape, w, rows, multiprocessors)))


def candidates(w: CudaInt4, rows: int, multiprocessors: int) -> list[WideShape]:
    """Shapes worth measuring, the likely ones first."""
    if rows < LEAST_ROWS:
        return []
    return sorted(_sensible(w, rows), key=lambda shape: _load(shape, w, rows, multiprocessors))[:_MOST_CANDIDATES]


def _sensible(w: CudaInt4, rows: int) -> list[WideShape]:
    """One shape for each cut, with as many stages as there is memory for."""
    shapes = []
    for tokens in (256, 128) if rows > 128 else (next(each for each in (16, 32, 64, 128) if rows <= each),):
        for warpgroups, cluster, sharers in product(_WARPGROUPS[tokens], _CLUSTERS, (1, 2)):
            if sharers > 1 and (cluster > 1 or tokens < 128):
                continue  # clusters of four leave multiprocessors without one
            for count in (1, 2, 3) if warpgroups == 1 else (1,):
                fitting = (WideShape(tokens, warpgroups, stages, cluster, sharers) for stages in _STAGES)
                shapes += [s for s in fitting if _fits(s, w) and blocks(s, w.group, w.scale_kind) >= count][:1]
    return list(dict.fromkeys(shapes))


def _load(shape: WideShape, w: CudaInt4, rows: int, multiprocessors: int) -> float:
    """Cycles of the busiest multiprocessor: its stages, starting and writing."""
    pieces = -(-rows // shape.tokens) * -(-_across(shape, w) // shape.sharers)
    wide = clusters_at_once(multiprocessors, shape.cluster * shape.sharers)
    together = min(blocks(shape, w.group, w.scale_kind), -(-pieces // wide))
    rounds = -(-pieces // (wide * together))
    cycles = (2 * shape.tokens + _STAGE_CYCLES) * shape.warpgroups * together
    stage = max(cycles, _LEAST_STAGE_CYCLES) * (1 if shape.sharers == 1 else _SHARED_STAGE)
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
        SHARERS=shape.sharers,
        OUT_BF16=int(out_bf16),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows of every launch of a shape from the weight and the result's dtype: worked out once."""

    machine: Machine
    kernel: Kernel
    box: tuple[int, int]
    codes: Tiles
    metas: Tiles
    across: int
    together: int
    at_once: int
    threads: int


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
    narrow = out.dtype is torch.bfloat16
    plan: Plan | None = w.plans.get((shape, narrow))
    if plan is None or plan.machine is not machine:
        plan = w.plans[shape, narrow] = _plan(machine, shape, w, narrow)
    rows = x.shape[0]
    panels = -(-rows // shape.tokens)
    pieces = panels * plan.across
    places = out.data_ptr() | (0 if residual is None else residual.data_ptr())
    aligned = w.out_features % 8 == 0 and places % 16 == 0
    arguments = (
        Tiles(x, plan.box), plan.codes, plan.metas, bias, residual, out, rows, w.out_features, w.chunks, panels,
        pieces, int(aligned),
    )  # fmt: skip
    plan.kernel((min(pieces, plan.at_once), plan.together, 1), plan.threads, arguments, overlap=True)


def _plan(machine: Machine, shape: WideShape, w: CudaInt4, narrow: bool) -> Plan:
    tiles = shape.warpgroups * _WARPGROUP_ROWS // TILE_ROWS
    codes, metas = w.codes.flatten(2), w.metas.flatten(2)
    together = shape.cluster * shape.sharers
    at_once = clusters_at_once(machine.multiprocessors, together) * blocks(shape, w.group, w.scale_kind)
    return Plan(
        machine=machine,
        kernel=machine.programs.kernel(wide_spec(shape, w.group, w.scale_kind, narrow)),
        box=(shape.tokens // shape.sharers, CHUNK),
        codes=Tiles(codes, (tiles, 1, codes.shape[2])),
        metas=Tiles(metas, (tiles, max(1, CHUNK // w.group), metas.shape[2])),
        across=-(-_across(shape, w) // shape.sharers),
        together=together,
        at_once=at_once if shape.cluster == 1 else _EVERY_PIECE,
        threads=(shape.warpgroups + 1) * 128,
    )
