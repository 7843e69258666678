"""Decode attention over latents in CUDA C++, as `cuda/sources/latent_decode.cu` explains."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.cuda.program import KernelSpec, Programs, spec
from deepseek_tgi.kernels.pages import LatentPages

MODES = {"bfloat16": 0, "float16": 1, "int8": 2, "fp8_e4m3fn": 3, "int4": 4}
"""Formats of pages that the kernel reads, as its source numbers them."""
RANK, ROPE = 512, 64
GROUPS = {"int8": 128, "fp8_e4m3fn": 128, "int4": 32}
_WARPS, _ROWS = 4, 16
_SIGNATURE = "pllpll" + "pppiplp" + "iifppi"
_COMBINE_SIGNATURE = "pppiiii" + "plp"
PRODUCT_THREADS, COLUMNS, VALUES = 128, 64, 16
"""Of the products around attention: threads, columns of latent space and values of a block."""
LEAST_TOKENS, LONE_LEAST_TOKENS = 64, 128
"""Positions that a block takes at least: fewer cost more in putting the parts together than they win. Of a lone request
with few heads twice as many: its values are made where parts are put together.
"""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a kernel is laid out: tiles of 8 positions in a piece, pieces under way, blocks a multiprocessor."""

    tiles: int
    stages: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Positions of a piece."""
        return 8 * self.tiles


CUTS = {
    "bfloat16": Cut(2, 4, 2), "float16": Cut(2, 4, 2), "int8": Cut(4, 4, 2), "fp8_e4m3fn": Cut(4, 4, 2),
    "int4": Cut(4, 4, 2),
}  # fmt: skip


WIDE = Cut(8, 2, 1)
"""Of the kernel for many heads."""
WIDE_ROWS, WIDE_FROM, HOPPER = 64, 48, 90
_WIDE_REGISTERS = {"MAKER_REGISTERS": 136, "ATTENDING_REGISTERS": 184}
_WIDE_THREADS = 384


def unfit(pages: LatentPages) -> str | None:
    """Why the kernel does not read such pages, if so."""
    if pages.mode not in MODES:
        return f"pages of {pages.mode}"
    if (pages.rank, pages.rope_dim) != (RANK, ROPE):
        return f"latents of {pages.rank} and rotary keys of {pages.rope_dim} elements ({RANK} and {ROPE} are wanted)"
    if pages.scale is not None and pages.group != GROUPS[pages.mode]:
        return f"groups of {pages.group}"
    return None


def decode_spec(mode: str, block_size: int, cut: Cut) -> KernelSpec:
    """The kernel that attends."""
    scales = {"int8": 8, "fp8_e4m3fn": 8, "int4": 16}.get(mode, 0)
    row = {"int4": RANK // 2, "int8": RANK, "fp8_e4m3fn": RANK}.get(mode, 2 * RANK)
    stage = cut.tokens * (row // _WARPS + 2 * ROPE // _WARPS + scales)
    return spec(
        "latent_decode", "latent_decode", _SIGNATURE,
        shared_bytes=_WARPS * (cut.stages * stage + 2 * 512 * cut.tiles + 4 * _ROWS), BLOCK=block_size,
        STAGES=cut.stages, BLOCKS=cut.blocks, **_shape(mode, cut),
    )  # fmt: skip


def wide_spec(mode: str, block_size: int) -> KernelSpec:
    """The kernel that attends for many heads: a table of queries, two of keys, what its two groups exchange."""
    shared = 3 * WIDE.tokens * 2 * (RANK + ROPE) + 8192 + 3 * 4 * WIDE.tokens + 1024
    return spec(
        "latent_wide", "latent_wide", _SIGNATURE, shared_bytes=shared, BLOCK=block_size, **_WIDE_REGISTERS,
        **_shape(mode, WIDE),
    )  # fmt: skip


def combine_spec(mode: str, cut: Cut, rows: int, teams: int, v_dim: int = 0) -> KernelSpec:
    """The kernel that puts parts of `rows` heads together; `teams` share a head's. With `v_dim` it makes values."""
    return spec(
        "latent_combine", "latent_combine", _COMBINE_SIGNATURE, ROWS=rows, TEAMS=teams, VALUE=v_dim,
        **_shape(mode, cut),
    )  # fmt: skip


def queries_spec(nope_dim: int) -> KernelSpec:
    """The kernel that brings queries into latent space."""
    return spec("latent_queries", "latent_queries", "pllplpi", 2 * COLUMNS * nope_dim, NOPE=nope_dim, RANK=RANK)


def values_spec(nope_dim: int, v_dim: int) -> KernelSpec:
    """The kernel that brings sums of latents out of it."""
    return spec("latent_values", "latent_values", "pplpi", NOPE=nope_dim, VALUE=v_dim, RANK=RANK)


def blocks_for(most: int, batch: int) -> int:
    """Blocks of a launch: as many for each request, where that costs few; equal lengths then have no block in two."""
    even = most // batch * batch
    return even if 16 * even >= 15 * most else most


def teams_for(blocks: int, batch: int) -> int:
    """Teams that share the parts of a head: four parts for each, about."""
    return next(teams for teams in (8, 4, 2, 1) if 4 * teams * batch <= blocks or teams == 1)


def _shape(mode: str, cut: Cut) -> dict[str, int]:
    return {"MODE": MODES[mode], "RANK": RANK, "ROPE": ROPE, "GROUP": GROUPS.get(mode, RANK), "TILES": cut.tiles}


class LatentDecode:
    """One query token a request, for any number of heads; asks the device for nothing.

    Heads go in tiles of 16, or of 64 on Hopper where there are many.
    """

    def __init__(self, programs: Programs, num_processors: int, capability: int = 0) -> None:
        self.programs = programs
        self._num_processors = num_processors
        self._capability = capability

    def __call__(
        self,
        absorbed: torch.Tensor,
        rotary: torch.Tensor,
        pages: LatentPages,
        step: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        *,
        cut: Cut | None = None,
        least_tokens: int = 0,
        values: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`softmax(scale * (absorbed latent + rotary rope)) latent` as `[H, B, R]`, bfloat16 like both queries.

        `absorbed [H, B, R]` and `rotary [H, B, Dr]` may be strided views with dense rows at multiples of 8 bytes.
        `step` are the block tables and what is cached of each request; a query sees itself as well. With INT4 pages
        queries and result are in the groups' rotated space.

        `values` are rows `[H, Dv, R]` and a result `[B, H, Dv]`, dense, both bfloat16: then that is what is made.
        `least_tokens` of a block: 0 stands for what was measured to be best.
        """
        tables, cached = step
        heads, batch = absorbed.shape[:2]
        if cut is None:
            cut = self._cut(pages.mode, heads)
        wide = cut is WIDE
        rows, threads = (WIDE_ROWS, _WIDE_THREADS) if wide else (_ROWS, 32 * _WARPS)
        kernel = wide_spec(pages.mode, pages.block_size) if wide else decode_spec(pages.mode, pages.block_size, cut)
        row_tiles = -(-heads // rows)
        blocks = blocks_for(max(1, self._num_processors * cut.blocks // row_tiles), batch)
        least_tokens = least_tokens or (LONE_LEAST_TOKENS if batch == 1 and not wide else LEAST_TOKENS)
        least = max(1, least_tokens // cut.tokens)
        slots = (blocks + batch) * row_tiles * rows
        parts = torch.empty(slots, RANK, dtype=torch.float32, device=absorbed.device)
        marks = torch.empty(slots, 2, dtype=torch.float32, device=absorbed.device)
        weights, out = values or (None, torch.empty(heads, batch, RANK, dtype=torch.bfloat16, device=absorbed.device))
        self.programs.kernel(kernel)(
            (blocks, row_tiles, 1), threads,
            (
                absorbed, absorbed.stride(0), absorbed.stride(1), rotary, rotary.stride(0), rotary.stride(1),
                pages.latent, pages.rope, pages.scale, page_bytes(pages), tables, tables.stride(0), cached, batch,
                heads, scale, parts, marks, least,
            ), overlap=True,
        )  # fmt: skip
        teams = teams_for(blocks, batch)
        step_of_head, v_dim = (0, 0) if weights is None else (weights.stride(0), weights.shape[1])
        self.programs.kernel(combine_spec(pages.mode, cut, rows, teams, v_dim))(
            (heads, batch, 4 if v_dim else 1), 128 * teams,
            (parts, marks, cached, batch, row_tiles, blocks, least, weights, step_of_head, out), overlap=True,
        )  # fmt: skip
        return out

    def _cut(self, mode: str, heads: int) -> Cut:
        if self._capability != HOPPER:  # a block of some has 99 KiB
            return replace(CUTS[mode], stages=3)
        return WIDE if heads >= WIDE_FROM else CUTS[mode]

    def queries(self, rest: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`rest [H, B, Dn]` times the first rows of `rows [H, Dn + Dv, R]`: `[H, B, R]`. Rows lie on 16-byte bounds."""
        heads, batch, nope = rest.shape
        out = torch.empty(heads, batch, RANK, dtype=torch.bfloat16, device=rest.device)
        self.programs.kernel(queries_spec(nope))(
            (RANK // COLUMNS, heads, 1), PRODUCT_THREADS,
            (rest, rest.stride(0), rest.stride(1), rows, rows.stride(0), out, batch), overlap=True,
        )  # fmt: skip
        return out

    def values(self, sums: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """`sums [H, B, R]` times the last rows of `rows [H, Dn + Dv, R]` into `out [B, H, Dv]`, all of them dense."""
        batch, heads, v_dim = out.shape
        nope = rows.shape[1] - v_dim
        self.programs.kernel(values_spec(nope, v_dim))(
            (v_dim // VALUES, heads, 1), PRODUCT_THREADS,
            (sums, rows[:, nope:], rows.stride(0), out, batch), overlap=True,
        )  # fmt: skip


def page_bytes(pages: LatentPages) -> int:
    """Bytes from a page to the next. Raises `GenerationError` for parts that do not lie as kernels read them."""
    step = pages.latent.stride(0) * pages.latent.element_size()
    for store in (pages.latent, pages.rope, pages.scale):
        if store is None:
            continue
        if store.stride(0) * store.element_size() != step or store.data_ptr() % 16 or step % 16:
            refuse(
                f"latent attention: got {describe('pages', store)} {store.stride(0) * store.element_size()} bytes "
                f"apart at address {store.data_ptr():#x}, expected all parts {step} apart, at multiples of 16"
            )
    return step
