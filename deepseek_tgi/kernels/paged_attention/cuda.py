"""Paged attention in CUDA C++: a decode step's queries, as `cuda/sources/paged_decode.cu` explains."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.heads import MODES, Norms, page_bytes
from deepseek_tgi.kernels.cuda.machine import machine_of, shared_limit
from deepseek_tgi.kernels.cuda.program import Argument, Kernel, KernelSpec, Programs, spec
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.paged_attention import PagedAttention, check_paged_attention
from deepseek_tgi.kernels.paged_attention.turns import NO_TURNS, Turns, TurnTables
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)

HEAD_UNIT, LARGEST_HEAD = 32, 256
INT4_HEADS = frozenset({64, 128, 256})
INT4_TABLE_BYTES = 64 << 10
CLUSTERS = (8, 4, 2)
"""Blocks that may take a group's context together; 8 is what every GPU with clusters can do."""
CLUSTERED_PART = 7 / 8
"""Of the multiprocessors, what clusters of more than two are sure to find room on all at once (an H200: 15 of 8 where
132 / 8 is 16): blocks share contexts of any length evenly, so one that comes late costs as much as all others.
"""
LEAST_TOKENS = 256
"""What a block takes at least: fewer tokens cost more in putting the parts together than they win."""
MORE_PIECES = 2
"""By how many pieces a block of a cluster may have more than an equal share, and be done sooner for all that."""
_SIGNATURE = "plppppl" + "pipii" + "fpppii" + "pppipi" + "plpl" + "ppf" + "ppff"


def provide(kernels: KernelSet) -> KernelSet:
    """Decode steps on CUDA C++, prompts as before."""
    machine = machine_of(kernels.device)
    decode = PagedDecode(
        machine.programs, machine.multiprocessors, kernels.device, CLUSTERS if machine.capability >= 90 else (),
        shared_limit(machine.capability), start=shared_start(machine.programs, kernels.device),
    )  # fmt: skip
    return replace(kernels, paged_attention=PagedAttentionOp(decode, kernels.paged_attention))


def shared_start(programs: Programs, device: torch.device) -> int:
    """Where dynamic shared memory begins on a device, which kernels of INT4 pages are compiled with; 0 if unknown."""
    told = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        programs.kernel(spec("shared_start", "shared_start", "p", 1024))((1, 1, 1), 32, (told,))
    except DeviceError as error:
        logger.warning("paged_attention: %s; levels of int4 pages are looked up more slowly", error)
    return int(told)


class PagedAttentionOp:
    """The op: decode steps here, what the kernel does not take to `others`, which is said once a reason."""

    def __init__(self, decode: PagedDecode, others: PagedAttention) -> None:
        self._decode = decode
        self._others = others
        self._said: set[str] = set()

    def takes_heads(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        out: torch.Tensor,
        placed: PlacedFrame | None,
    ) -> bool:
        """Whether `attend_heads` does this step: one of few requests, where launches and latencies are most."""
        decodes = inputs.max_seqlen == 1 and q.shape[0] == inputs.cache_lens.shape[0] > 0
        if not decodes or pages.mode == "int4":
            return False
        shape = decode_shape(q, pages, out)
        return self._decode.unfit(shape, pages, placed) is None and self._decode.is_few(shape, pages, q.shape[0])

    def attend_heads(
        self,
        q: torch.Tensor,
        new: NewHeads,
        pages: LayerPages,
        inputs: ForwardInputs,
        *,
        scale: float,
        out: torch.Tensor,
        placed: PlacedFrame | None,
    ) -> None:
        """Norm, rotation, the write of the new token and attention, one launch; q and `new` stay as they are."""
        check_paged_attention(q, pages, inputs, out, placed, dtypes=ACTIVATIONS)
        self._decode.launch((q, out), pages, inputs, scale=scale, placed=placed, new=new)

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
        unfit = self._decode.unfit(decode_shape(q, pages, y), pages, placed)
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
    registers for, blocks of a cluster.
    """

    tiles: int
    warps: int
    blocks: int
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class NewHeads:
    """A decode step's keys `[B, G, Dk]` and values `[B, G, Dv]` as projected, dense heads, and what is done to them."""

    k: torch.Tensor
    v: torch.Tensor
    cos_sin: torch.Tensor
    norms: Norms | None = None
    k_scale: float | None = None
    v_scale: float | None = None


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
    fused: bool = False

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

    def tiling(self, few: bool = False, fewest: bool = False) -> Tiling:
        """How the work is cut; `few` where requests and heads are fewer than multiprocessors, `fewest` where so many
        blocks share each. Measured on an H200.
        """
        if max(self.k_dim, self.v_dim) > 128 or self.query_tiles > 1:
            return Tiling(1, 4, 2)
        if MODES[self.mode] < 2:
            return Tiling(1, 8, 1) if few else Tiling(2, 4, 2)
        if self.centred and not fewest:
            return Tiling(1, 16, 1) if self.mode == "int4" else Tiling(1, 12, 1)
        if self.mode == "int4":
            if self.centred and self.ratio > 4:  # two sets of sums: 128 registers are too few
                return Tiling(1, 12, 1)
            return Tiling(1, 8, 2) if few else Tiling(2, 8, 2)
        return Tiling(1, 8, 1) if self.centred else Tiling(1, 8, 2)

    def spec(self, tiling: Tiling, start: int = 0) -> KernelSpec:
        """The kernel; `start` is where a block's dynamic shared memory begins, if that is known."""
        shared = self.shared_bytes(tiling)
        known = start if self.mode == "int4" and tiling.cluster == 1 else 0  # in clusters addresses name the block too
        return spec(
            "paged_decode", "paged_decode", _SIGNATURE, shared, MODE=MODES[self.mode], DK=self.k_dim, DV=self.v_dim,
            BLOCK=self.block_size, RATIO=self.ratio, NT=self.query_tiles, WARPS=tiling.warps, TILES=tiling.tiles,
            BLOCKS=tiling.blocks, CLUSTER=tiling.cluster, SHARED=shared, Q_BF16=int(self.q_dtype == torch.bfloat16),
            OUT_BF16=int(self.out_dtype == torch.bfloat16), CENTRE=int(self.centred), FUSED=int(self.fused),
            SHARED_START=known,
        )  # fmt: skip

    def shared_bytes(self, tiling: Tiling) -> int:
        """Of the kernel's own struct, which says so if it is more, and of the table of levels."""
        words = tiling.warps * self.rows * (self.v_dim + 6) + self.rows * (self.k_dim // 2 + 3) + 16
        words += (self.k_dim + self.v_dim) // 2 + 2  # a key and a value as stored
        words += self.k_dim * (self.fused + self.centred)  # a row of cosines and sines, a centre
        if self.centred:
            slots = self.k_dim // 2
            words += self.rows * 2 * (slots + 4) + 3 * slots + 4  # queries' pairs, a head's own
            words += 0 if self.mode == "int4" else 32 * slots  # cosines and sines of 16 tokens
            starts = 4 * tiling.tiles * slots
            if self.rows * (self.v_dim + 4) < max(self.k_dim, self.v_dim) + starts:
                words += tiling.warps * starts  # the centre at starts of tiles, where sums have no room for it
            words += 2
        table = INT4_TABLE_BYTES if self.mode == "int4" else 0
        return table + -(-4 * words // 64) * 64


class PagedDecode:
    """One query token a request over its pages. Owner of the kernels' workspace; one call at a time on one stream."""

    def __init__(
        self,
        programs: Programs,
        num_processors: int,
        device: torch.device,
        clusters: Sequence[int] = (),
        most_shared: int = shared_limit(90),
        *,
        start: int = 0,
    ) -> None:
        """`clusters`: how many blocks may go together, most first; `most_shared`: bytes of a block's shared memory;
        `start`: see `DecodeShape.spec`.
        """
        self._programs = programs
        self._num_processors = num_processors
        self._device = device
        self._clusters = clusters
        self._most_shared = most_shared
        self._start = start
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
        new: NewHeads | None = None,
        tiling: Tiling | None = None,
        least_tokens: int = LEAST_TOKENS,
        more_pieces: int = MORE_PIECES,
    ) -> None:
        """The same for queries and outputs `rows`, with `new` heads as they come from their projection.

        Other `tiling`, `least_tokens` and `more_pieces` are for measuring.
        """
        q, out = rows
        turns = self._turns_of(pages, placed)
        assert turns is not None, "`unfit` says so"
        shape = replace(decode_shape(q, pages, out), centred=turns is not NO_TURNS, fused=new is not None)
        batch, groups = inputs.cache_lens.shape[0], pages.num_heads * shape.groups
        cut = tiling or self._tiling(shape, batch * groups)
        num_blocks = self._clusters_of(cut, cut.cluster) * cut.cluster
        least_pieces = max(1, least_tokens // (16 * cut.tiles * cut.warps))
        self._kernel(shape, cut)(
            (num_blocks // cut.cluster, cut.cluster, 1),
            cut.warps * 32,
            (
                q, q.stride(0), pages.k, pages.v, pages.k_scale, pages.v_scale, page_bytes(pages),
                inputs.block_tables, inputs.block_tables.stride(0), inputs.cache_lens, batch, pages.num_heads,
                scale, out, self._workspace(num_blocks, shape.rows * (shape.v_dim + 2)),
                self._counters(batch * groups), least_pieces, more_pieces,
                turns.centre, turns.starts, turns.heads, turns.steps,
                *((None, turns.rotary, *_NO_HEADS) if new is None else _heads(new, inputs)),
            ),
            overlap=_recorded(self._device),
        )  # fmt: skip

    def unfit(self, shape: DecodeShape, pages: LayerPages, placed: PlacedFrame | None) -> str | None:
        """Why there is no kernel for this shape and frame, if so."""
        if shape.unfit is None and self._turns_of(pages, placed) is None:
            return "keys with a centre and angles that are not in proportion to positions"
        return shape.unfit

    def _turns_of(self, pages: LayerPages, placed: PlacedFrame | None) -> Turns | None:
        if placed is None or placed.frame.centre is None or not pages.quantised:
            return NO_TURNS
        return self._turns.of(placed, pages)

    def is_few(self, shape: DecodeShape, pages: LayerPages, batch: int) -> bool:
        """Whether requests and heads are fewer than multiprocessors."""
        return batch * pages.num_heads * shape.groups < self._num_processors

    def _tiling(self, shape: DecodeShape, groups: int) -> Tiling:
        """The shape's own as far as shared memory goes, in clusters where there is one for every group."""
        cut = shape.tiling(groups < self._num_processors, 8 * groups < self._num_processors)
        while shape.shared_bytes(cut) > self._most_shared and cut.warps > 2:
            cut = replace(cut, warps=cut.warps // 2)
        fitting = (size for size in self._clusters if groups <= self._clusters_of(cut, size))
        return replace(cut, cluster=next(fitting, 1))

    def _clusters_of(self, cut: Tiling, size: int) -> int:
        """How many clusters of `size` blocks there are room for at once. Neighbours are always two."""
        blocks = self._num_processors * cut.blocks
        return blocks // size if size <= 2 else int(blocks * CLUSTERED_PART) // size

    def _kernel(self, shape: DecodeShape, tiling: Tiling) -> Kernel:
        found = self._kernels.get((shape, tiling))
        if found is None:
            found = self._kernels[shape, tiling] = self._programs.kernel(shape.spec(tiling, self._start))
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


_NO_HEADS: tuple[Argument, ...] = (None, 0, None, 0, None, None, 0.0, None, None, 0.0, 0.0)


def _heads(new: NewHeads, inputs: ForwardInputs) -> tuple[Argument, ...]:
    norms = (None, None, 0.0) if new.norms is None else (new.norms.q, new.norms.k, new.norms.eps)
    return (
        new.cos_sin, new.cos_sin.shape[1], new.k, new.k.stride(0), new.v, new.v.stride(0), *norms, inputs.positions,
        inputs.slots, -1.0 if new.k_scale is None else new.k_scale, -1.0 if new.v_scale is None else new.v_scale,
    )  # fmt: skip


def _recorded(device: torch.device) -> bool:
    """Whether the launch goes into a graph: then nothing ahead of it wrote what it reads before it waits."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def decode_shape(q: torch.Tensor, pages: LayerPages, out: torch.Tensor) -> DecodeShape:
    """Which kernel these operands want."""
    return DecodeShape(
        pages.mode, pages.k_dim, pages.v_dim, pages.block_size, q.shape[1] // pages.num_heads, q.dtype, out.dtype
    )
