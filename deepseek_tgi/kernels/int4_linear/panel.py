"""The kernel for many rows (`cuda/sources/int4_panel.cu`, sm_90): its shapes, what they need, its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.cuda.machine import Machine, shared_limit
from deepseek_tgi.kernels.cuda.program import KernelSpec, spec
from deepseek_tgi.kernels.int4_linear.layout import CHUNK, TILE_ROWS, CudaInt4

SOURCE = "int4_panel"
SIGNATURE = "ppplpppiiiiii"
TOKENS = (16, 32, 64, 128, 256)
MOST_ROWS = 512
"""Beyond this, a weight nobody has measured is dequantised and multiplied by torch."""
_SHARED_LIMIT = shared_limit(90)
_WARPGROUP_ROWS = 64
_WARPGROUPS = (4, 2, 1)
_CLUSTERS = (1, 2, 4, 8)
_START_CHUNKS = 8
"""What starting a block and adding up its sums cost, in chunks of its work."""


@dataclass(frozen=True, slots=True)
class PanelShape:
    """One way to cut the work; see the source."""

    tokens: int = 128
    warpgroups: int = 2
    stages: int = 4
    cluster: int = 1

    def __post_init__(self) -> None:
        assert self.tokens in TOKENS, f"{self}: the matrix instruction has no such width here"
        assert self.warpgroups in _WARPGROUPS, f"{self}: a block has no such width"
        assert self.cluster in _CLUSTERS, f"{self}: there are no such clusters"
        assert self.stages >= 3, f"{self}: one stage is read, one is being filled, one waits for its products"


def shared_bytes(shape: PanelShape, group: int, scale_kind: int) -> int:
    """Dynamic shared memory of a block: its stages, which become the sums of its tokens."""
    metas = max(1, CHUNK // group) * (64 if scale_kind else 128)
    stage = shape.tokens * CHUNK * 2 + shape.warpgroups * 4 * (512 + metas)
    sums = shape.tokens * (shape.warpgroups * _WARPGROUP_ROWS + 4) * 4
    return max(shape.stages * stage, sums)


def fits(shape: PanelShape, w: CudaInt4, capability: int) -> bool:
    """Whether `shape` can run."""
    return capability == 90 and _fits(shape, w)


def default_shapes(w: CudaInt4, rows: int, multiprocessors: int) -> tuple[PanelShape, ...]:
    """Shapes in the order to try, for a weight nobody has measured; none where dequantising is thought faster."""
    if rows > MOST_ROWS:
        return ()
    return tuple(sorted(_sensible(w, rows), key=lambda shape: _load(shape, w, rows, multiprocessors)))


def candidates(w: CudaInt4, rows: int, multiprocessors: int) -> list[PanelShape]:
    """Shapes worth measuring, the likely ones first."""
    return sorted(_sensible(w, rows), key=lambda shape: _load(shape, w, rows, multiprocessors))[:16]


def _sensible(w: CudaInt4, rows: int) -> list[PanelShape]:
    widths = [tokens for tokens in TOKENS if 64 <= tokens < 2 * max(rows, 64)][-2:]
    shapes = []
    for tokens in widths:
        for warpgroups in _WARPGROUPS if tokens < 256 else _WARPGROUPS[1:]:
            for cluster in _CLUSTERS:
                stages = next((n for n in (6, 5, 4) if _fits(PanelShape(tokens, warpgroups, n, cluster), w)), None)
                if stages is not None:
                    shapes.append(PanelShape(tokens, warpgroups, stages, cluster))
    return shapes


def _load(shape: PanelShape, w: CudaInt4, rows: int, multiprocessors: int) -> float:
    """Work of the busiest multiprocessor: a chunk costs its products and, as a warpgroup more, its copies of x."""
    blocks = _across(shape, w) * -(-rows // shape.tokens) * shape.cluster
    chunk = shape.tokens * (shape.warpgroups + 1)
    return -(-blocks // multiprocessors) * (w.chunks / shape.cluster + _START_CHUNKS) * chunk


def _across(shape: PanelShape, w: CudaInt4) -> int:
    return -(-w.codes.shape[0] * TILE_ROWS // (shape.warpgroups * _WARPGROUP_ROWS))


def _fits(shape: PanelShape, w: CudaInt4) -> bool:
    return shared_bytes(shape, w.group, w.scale_kind) <= _SHARED_LIMIT and w.chunks >= shape.cluster


def panel_spec(shape: PanelShape, group: int, scale_kind: int, out_bf16: bool) -> KernelSpec:
    """The kernel of `shape`."""
    return spec(
        SOURCE,
        SOURCE,
        SIGNATURE,
        shared_bytes(shape, group, scale_kind),
        TOKENS=shape.tokens,
        WARPGROUPS=shape.warpgroups,
        STAGES=shape.stages,
        GROUP=group,
        SCALE_KIND=scale_kind,
        CLUSTER=shape.cluster,
        OUT_BF16=int(out_bf16),
    )


def launch(
    machine: Machine,
    shape: PanelShape,
    x: torch.Tensor,
    w: CudaInt4,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Enqueue `out = x w^T + bias + residual`, x in bfloat16, its rows dense and aligned to 16 bytes."""
    kernel = machine.programs.kernel(panel_spec(shape, w.group, w.scale_kind, out.dtype == torch.bfloat16))
    rows, tiles = x.shape[0], w.codes.shape[0]
    across = _across(shape, w)
    arguments = (
        w.codes, w.metas, x, x.stride(0), bias, residual, out, rows, w.out_features, w.in_features, tiles, w.chunks,
        w.metas.shape[1],
    )  # fmt: skip
    kernel((-(-rows // shape.tokens), shape.cluster, across), shape.warpgroups * 128, arguments, overlap=True)
