"""Paged attention in Triton: any step, as `tile_kernel` explains. Asks the device for nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.paged_attention import PagedAttention, check_paged_attention
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.precision import int4_group
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kernels.triton_use import triton_unfit

logger = logging.getLogger(__name__)

MODES = {"bfloat16": 0, "float16": 1, "int8": 2, "fp8_e4m3fn": 3, "int4": 4}
LARGEST_HEAD = 256
UNPACKED_BYTES = 512 << 20
"""Quantised contexts of prompts are read into bfloat16 once, if they take no more than this."""


def provide(kernels: KernelSet) -> KernelSet:
    """Attention in Triton. Raises `BuildError` without it."""
    unfit = triton_unfit()
    if unfit is not None:
        raise BuildError(f"paged_attention: {unfit}")
    return replace(kernels, paged_attention=TiledAttention(kernels.paged_attention))


class TiledAttention:
    """The op: formats and sizes that the kernel does not take go to `others`, which is said once a reason."""

    def __init__(
        self, others: PagedAttention, *, interpreted: bool = False, unpacked_bytes: int = UNPACKED_BYTES
    ) -> None:
        self._others = others
        self._unpacked_bytes = unpacked_bytes
        self._interpreted = interpreted
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
        unfit = None
        if pages.mode not in MODES:
            unfit = f"pages of {pages.mode}"
        elif max(pages.k_dim, pages.v_dim) > LARGEST_HEAD:
            unfit = f"heads of more than {LARGEST_HEAD} elements"
        if unfit is not None:
            if unfit not in self._said:
                self._said.add(unfit)
                logger.warning("paged_attention: no Triton kernel for %s; torch does the work, which is slower", unfit)
            return self._others(q, pages, inputs, scale, y, placed=placed)
        if y.numel():
            self._launch(q, y, pages, inputs, scale=scale, placed=placed)
        return y

    def _launch(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        *,
        scale: float,
        placed: PlacedFrame | None,
    ) -> None:
        from deepseek_tgi.kernels.paged_attention.tile_kernel import paged_tile

        ratio, batch = q.shape[1] // pages.num_heads, inputs.cache_lens.shape[0]
        centre, cos_sin = None, None
        if pages.quantised and placed is not None and placed.frame.centre is not None:
            centre, cos_sin = placed.frame.centre, placed.cos_sin
        rotary = 0 if cos_sin is None else cos_sin.shape[1]
        tables, rest, unpacked = inputs.block_tables, None, None
        if pages.quantised and inputs.max_seqlen > 1:
            unpacked = self._unpack(pages, inputs, centre, cos_sin)
        if unpacked is not None:
            pages, tables, rest = unpacked
            centre, cos_sin, rotary = None, None, 0
        constants = tile_constants(pages, ratio, rotary)
        cut = tile_shape(
            pages, None if inputs.max_seqlen > 1 else ratio, centred=centre is not None, parts=1 + (rest is not None)
        )
        rows = cut["BM"]
        tiles = min(-(-q.shape[0] * ratio // rows) + batch, batch * -(-inputs.max_seqlen * ratio // rows))
        paged_tile[tiles, pages.num_heads](
            q, q.stride(0), _bytes(pages.k), _bytes(rest), _bytes(pages.v), _bytes(pages.k_scale),
            _bytes(pages.v_scale), pages.k.stride(0) * pages.k.element_size(), tables, tables.stride(0),
            inputs.cu_seqlens, inputs.cache_lens, batch, scale, out, centre, cos_sin, **constants, **cut,
            REST=rest is not None, UPCAST=self._interpreted,
        )  # fmt: skip

    def _unpack(
        self, pages: LayerPages, inputs: ForwardInputs, centre: torch.Tensor | None, cos_sin: torch.Tensor | None
    ) -> tuple[LayerPages, torch.Tensor, torch.Tensor | None] | None:
        """The step's contexts in bfloat16, the table of their pages, and rests of keys if their centre was put back.

        None if that is too much memory.
        """
        from deepseek_tgi.kernels.paged_attention.tile_kernel import unpack_pages

        heads, size, k_dim, v_dim = pages.num_heads, pages.block_size, pages.k_dim, pages.v_dim
        batch, blocks = inputs.cache_lens.shape[0], -(-inputs.max_context // size)
        page = -(-2 * heads * size * (k_dim + v_dim + (0 if centre is None else k_dim)) // 16) * 16
        if batch * blocks * page > self._unpacked_bytes:
            return None
        device = pages.k.device
        plain = torch.empty(batch * blocks * page, dtype=torch.uint8, device=device)
        constants = tile_constants(pages, 1, 0 if cos_sin is None else cos_sin.shape[1])
        names: tuple[str, ...] = ("MODE", "BLOCK", "CENTRE", "ROTARY", "MARK")
        names += tuple(f"{key}{x}" for key in ("D", "P", "GROUP_", "SIZE_", "TURN_") for x in "KV")
        unpack_pages[-(-inputs.max_context // 32), heads, batch](
            _bytes(pages.k), _bytes(pages.v), _bytes(pages.k_scale), _bytes(pages.v_scale),
            pages.k.stride(0) * pages.k.element_size(), inputs.block_tables, inputs.block_tables.stride(0),
            inputs.cu_seqlens, inputs.cache_lens, centre, cos_sin, plain, page, blocks,
            **{name: constants[name] for name in names}, BN=32, UPCAST=self._interpreted,
        )  # fmt: skip
        wide, count = plain.view(torch.bfloat16), batch * blocks

        def part(start: int, width: int) -> torch.Tensor:
            return wide.as_strided(
                (count, heads, size, width), (page // 2, size * width, width, 1), heads * size * start
            )

        tables = torch.arange(count, dtype=torch.int32, device=device).view(batch, blocks)
        rest = None if centre is None else part(k_dim + v_dim, k_dim)
        return LayerPages(part(0, k_dim), part(k_dim, v_dim), None, None, "bfloat16", size), tables, rest


def tile_constants(pages: LayerPages, ratio: int, rotary: int) -> dict[str, Any]:
    """Constants of the kernel that follow from the cache's shape; `rotary` is 0 without a centre."""
    marks = pages.k_scale if pages.k_scale is not None and pages.k_scale.dtype == torch.uint8 else None
    sizes = [(d, d & -d) for d in (pages.k_dim, pages.v_dim)]
    return {
        "MODE": MODES[pages.mode], "RATIO": ratio, "BLOCK": pages.block_size, "CENTRE": rotary > 0, "ROTARY": rotary,
        "PR": _padded(rotary // 2), "MARK": 0 if rotary == 0 or marks is None else marks.shape[3],
        **{f"{key}{x}": value for x, (d, size) in zip("KV", sizes, strict=True) for key, value in (
            ("D", d), ("P", _padded(d)), ("GROUP_", int4_group(d)), ("SIZE_", size),
            ("TURN_", 2.0 ** -(size.bit_length() // 2)),
        )},
    }  # fmt: skip


def tile_shape(pages: LayerPages, rows: int | None, *, centred: bool, parts: int = 1) -> dict[str, int]:
    """How many rows and keys, of `parts` parts, a program takes, for requests of at most `rows` rows.

    Prompts of any length (None) have one shape: another is another kernel to compile while a request waits.
    """
    wide = max(pages.k_dim, pages.v_dim) > 128 or centred or pages.mode == "int4"
    most = 64 if wide else 128
    size = most if rows is None or rows > 16 else 16
    keys = 32 if wide else 128 if size >= 128 and parts == 1 and pages.mode in ("bfloat16", "float16") else 64
    stages = 1 if pages.mode == "int4" else 2 if wide or size >= 128 else 3
    return {"BM": size, "BN": keys, "num_warps": 8 if size >= 128 else 4, "num_stages": stages}


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _bytes(store: torch.Tensor | None) -> torch.Tensor | None:
    return None if store is None else store.view(torch.uint8)
