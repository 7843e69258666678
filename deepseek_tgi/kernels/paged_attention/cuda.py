"""Paged attention in CUDA C++: a decode step's queries, as `cuda/sources/paged_decode.cu` explains."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.heads import MODES, page_bytes
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec, Programs, spec
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.paged_attention import PagedAttention, check_paged_attention
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)

HEAD_UNIT, LARGEST_HEAD = 32, 256
INT4_HEADS = frozenset({64, 128, 256})
INT4_TABLE_BYTES = (48 << 10) + 256
"""A table of 32 KiB, and as much more as makes the driver allow what the kernel has besides."""
LEAST_TOKENS = 256
"""What a block takes at least: fewer tokens cost more in putting the parts together than they win."""
_SIGNATURE = "plppppl" + "pipii" + "fpppi" + "pppii"


def provide(kernels: KernelSet) -> KernelSet:
    """Decode steps on CUDA C++, prompts as before."""
    machine = machine_of(kernels.device)
    decode = PagedDecode(machine.programs, machine.multiprocessors, kernels.device)
    return replace(kernels, paged_attention=PagedAttentionOp(decode, kernels.paged_attention))


class PagedAttentionOp:
    """The op: decode steps here, what the kernel does not take to `others`, which is said once a reason."""

    def __init__(self, decode: PagedDecode, others: PagedAttention) -> None:
        self._decode = decode
        self._others = others
        self._said: set[str] = set()

    def __call__(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        scale: float,
        out: torch.Tensor | None = None,
        *,
        placed: PlacedFrame | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        check_paged_attention(q, pages, inputs, out, placed, dtypes=ACTIVATIONS)
        y = q.new_empty((*q.shape[:2], pages.v_dim)) if out is None else out
        if inputs.max_seqlen > 1 or q.shape[0] != inputs.cache_lens.shape[0]:
            return self._others(q, pages, inputs, scale, y, placed=placed)
        unfit = decode_shape(q, pages, y).unfit
        if unfit is None:
            if y.numel():
                self._decode(q, pages, inputs, scale, y, placed=placed)
            return y
        if unfit not in self._said:
            self._said.add(unfit)
            logger.warning("paged_attention: no CUDA kernel for %s; another does the work, which is slower", unfit)
        return self._others(q, pages, inputs, scale, y, placed=placed)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel cuts its work: 16-token tiles a warp holds at a time, warps of a block, blocks a multiprocessor has
    registers for.
    """

    tiles: int
    warps: int
    blocks: int


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What one compiled kernel is for. `ratio` is the query heads of a KV head."""

    mode: str
    k_dim: int
    v_dim: int
    block_size: int
    ratio: int
    q_dtype: torch.dtype
    out_dtype: torch.dtype
    centred: bool = False

    @property
    def unfit(self) -> str | None:
        """Why there is no kernel for this shape, if so."""
        if self.mode not in MODES:
            return f"pages of {self.mode}"
        for size in (self.k_dim, self.v_dim):
            if self.mode == "int4" and size not in INT4_HEADS:
                return f"int4 heads of {size} elements (64, 128 or 256 are wanted)"
            if size % HEAD_UNIT or size > LARGEST_HEAD:
                return f"heads of {size} elements (a multiple of {HEAD_UNIT} up to {LARGEST_HEAD} is wanted)"
        return None

    @property
    def query_tiles(self) -> int:
        """Tiles of eight queries that a warp works on at a time."""
        return 2 if self.ratio > 8 and self.v_dim <= 128 else 1

    @property
    def rows(self) -> int:
        """Queries of a group: those that share what is read of a KV head."""
        return 8 * self.query_tiles

    @property
    def groups(self) -> int:
        """Groups of a KV head."""
        return -(-self.ratio // self.rows)

    def tiling(self, few: bool = False) -> Tiling:
        """How the work is cut; `few` where requests and heads are fewer than multiprocessors. Measured on an H200."""
        if max(self.k_dim, self.v_dim) > 128 or self.query_tiles > 1:
            return Tiling(1, 4, 2)
        if MODES[self.mode] < 2:
            return Tiling(1, 8, 1) if few else Tiling(2, 4, 2)
        if self.centred:
            return Tiling(1, 4, 3)
        return Tiling(2, 4, 3) if self.mode == "int4" else Tiling(1, 8, 2)

    def spec(self, tiling: Tiling) -> KernelSpec:
        """The kernel."""
        table = INT4_TABLE_BYTES if self.mode == "int4" else 0
        return spec(
            "paged_decode", "paged_decode", _SIGNATURE, table, MODE=MODES[self.mode], DK=self.k_dim, DV=self.v_dim,
            BLOCK=self.block_size, RATIO=self.ratio, NT=self.query_tiles, WARPS=tiling.warps, TILES=tiling.tiles,
            BLOCKS=tiling.blocks, Q_BF16=int(self.q_dtype == torch.bfloat16),
            OUT_BF16=int(self.out_dtype == torch.bfloat16), CENTRE=int(self.centred),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turns:
    """What the kernel adds keys' centre with; see `TurnTables`."""

    centre: torch.Tensor | None = None
    table: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    steps: int = 0
    rotary: int = 0


NO_TURNS = Turns()


class TurnTables:
    """Tables of cosines and sines, and the pairs of elements that a centre has: each made once and kept.

    `table [P, R/2 + 1, 4] float16` is cos and sin of each pair, then what rounding left of them; the last pair is 1 and
    0, for what does not turn. `pairs [G, 4 n] int32` has -1 behind a head's last.
    """

    def __init__(self) -> None:
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turns: dict[int, tuple[Frame, Turns]] = {}

    def of(self, placed: PlacedFrame, pages: LayerPages) -> Turns:
        """Those of a frame with a centre. Asks the device the first time."""
        frame, cos_sin = placed.frame, placed.cos_sin
        kept = self._turns.get(id(frame))
        if kept is None or kept[0] is not frame or kept[1].rotary != cos_sin.shape[1]:
            assert frame.centre is not None, "only frames with a centre turn"
            pairs = _pairs(frame.centre, cos_sin.shape[1], still=pages.mode == "int4")
            kept = (frame, Turns(frame.centre, None, pairs, pairs.shape[1] // 4, cos_sin.shape[1]))
            self._turns[id(frame)] = kept
        return replace(kept[1], table=self._table(cos_sin))

    def _table(self, cos_sin: torch.Tensor) -> torch.Tensor:
        for source, table in self._tables:
            if source is cos_sin:
                return table
        still = torch.tensor([1.0, 0.0], device=cos_sin.device).expand(len(cos_sin), 1, 2)
        wide = torch.cat((torch.stack(cos_sin.chunk(2, 1), 2), still), 1)  # [P, R/2 + 1, 2]
        high = wide.half()
        table = torch.cat((high, (wide - high.float()).half()), 2).contiguous()
        self._tables.append((cos_sin, table))
        return table


def _pairs(centre: torch.Tensor, rotary: int, *, still: bool) -> torch.Tensor:
    """Indices of the pairs of each head that are not zero, padded; with `still`, one for all that does not turn."""
    half = rotary // 2
    first, second, rest = centre[:, :half], centre[:, half:rotary], centre[:, rotary:]
    present = (first != 0) | (second != 0)
    if still:
        present = torch.cat((present, (rest != 0).any(1, keepdim=True)), 1)
    found = [row.nonzero().flatten().tolist() for row in present]
    width = max(1, -(-max(map(len, found)) // 4)) * 4
    padded = [row + [-1] * (width - len(row)) for row in found]
    return torch.tensor(padded, dtype=torch.int32, device=centre.device)


class PagedDecode:
    """One query token a request over its pages. Owner of the kernels' workspace; one call at a time on one stream."""

    def __init__(self, programs: Programs, num_processors: int, device: torch.device) -> None:
        self._programs = programs
        self._num_processors = num_processors
        self._device = device
        self._kernels: dict[tuple[DecodeShape, Tiling], Kernel] = {}
        self._turns = TurnTables()
        self._parts: dict[int, torch.Tensor] = {}
        self._arrived: list[torch.Tensor] = []

    def __call__(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        scale: float,
        out: torch.Tensor,
        *,
        placed: PlacedFrame | None = None,
    ) -> None:
        """Attend into `out [B, H, Dv]`; `q [B, H, Dk]` may be a strided view with dense heads."""
        self.launch((q, out), pages, inputs, scale=scale, placed=placed)

    def launch(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        pages: LayerPages,
        inputs: ForwardInputs,
        *,
        scale: float,
        placed: PlacedFrame | None = None,
        tiling: Tiling | None = None,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """The same for queries and outputs `rows`; another `tiling` and `least_tokens` are for measuring."""
        q, out = rows
        centred = pages.quantised and placed is not None and placed.frame.centre is not None
        shape = replace(decode_shape(q, pages, out), centred=centred)
        turns = self._turns.of(placed, pages) if centred and placed is not None else NO_TURNS
        batch, groups = inputs.cache_lens.shape[0], pages.num_heads * shape.groups
        cut = tiling or shape.tiling(batch * groups < self._num_processors)
        num_blocks = self._num_processors * cut.blocks
        least_pieces = max(1, least_tokens // (16 * cut.tiles * cut.warps))
        self._kernel(shape, cut)(
            (num_blocks, 1, 1),
            cut.warps * 32,
            (
                q, q.stride(0), pages.k, pages.v, pages.k_scale, pages.v_scale, page_bytes(pages),
                inputs.block_tables, inputs.block_tables.stride(0), inputs.cache_lens, batch, pages.num_heads,
                scale, out, self._workspace(num_blocks, shape.rows * (shape.v_dim + 2)),
                self._counters(batch * groups), least_pieces,
                turns.centre, turns.table, turns.pairs, turns.steps, turns.rotary,
            ),
            overlap=True,
        )  # fmt: skip

    def _kernel(self, shape: DecodeShape, tiling: Tiling) -> Kernel:
        found = self._kernels.get((shape, tiling))
        if found is None:
            found = self._kernels[shape, tiling] = self._programs.kernel(shape.spec(tiling))
        return found

    def _workspace(self, num_blocks: int, part: int) -> torch.Tensor:
        size = 2 * num_blocks * part
        found = self._parts.get(size)
        if found is None:
            found = self._parts[size] = torch.empty(size, dtype=torch.float32, device=self._device)
        return found

    def _counters(self, count: int) -> torch.Tensor:
        """`count` zeros, which every launch leaves as zeros. Smaller ones stay: CUDA graphs may know them."""
        if not self._arrived or self._arrived[-1].numel() < count:
            self._arrived.append(torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=self._device))
        return self._arrived[-1]


def decode_shape(q: torch.Tensor, pages: LayerPages, out: torch.Tensor) -> DecodeShape:
    """Which kernel these operands want."""
    return DecodeShape(
        pages.mode, pages.k_dim, pages.v_dim, pages.block_size, q.shape[1] // pages.num_heads, q.dtype, out.dtype
    )
