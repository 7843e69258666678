"""Paged attention in Triton: any step, as `tile_kernel` explains. Asks the device for nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.machine import shared_limit
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.paged_attention import PagedAttention, check_paged_attention
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.precision import int4_group
from deepseek_tgi.kernels.seen import Seen
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kernels.triton_launch import TritonLaunches
from deepseek_tgi.kernels.triton_use import triton_unfit

logger = logging.getLogger(__name__)

MODES = {"bfloat16": 0, "float16": 1, "int8": 2, "fp8_e4m3fn": 3, "int4": 4}
LARGEST_HEAD, USUAL_HEAD = 256, 128
HOPPER_SHARED, PROMPT_SHARED = shared_limit(90), 128 << 10
"""Bytes of shared memory: what blocks of the GPUs that this is tuned for have, and what the usual prompts want."""
UNPACKED_BYTES = 512 << 20
"""Quantised contexts of prompts are read into bfloat16 once, if they take no more than this."""
_UNPACKED_TOKENS = 32
"""Of a program that unpacks."""
_LEAST_NUMBERS = 4096


def provide(kernels: KernelSet) -> KernelSet:
    """Attention in Triton. Raises `BuildError` without it."""
    unfit = triton_unfit()
    if unfit is not None:
        raise BuildError(f"paged_attention: {unfit}")
    where, most = kernels.device, HOPPER_SHARED
    if where.type == "cuda":
        major, minor = torch.cuda.get_device_capability(where)
        most = shared_limit(major * 10 + minor)
    return replace(kernels, paged_attention=TiledAttention(kernels.paged_attention, most_shared=most))


class TiledAttention:
    """The op: formats and sizes that the kernel does not take go to `others`, which is said once a reason."""

    def __init__(
        self,
        others: PagedAttention,
        *,
        interpreted: bool = False,
        unpacked_bytes: int = UNPACKED_BYTES,
        most_shared: int = HOPPER_SHARED,
    ) -> None:
        """`most_shared`: bytes of shared memory that a block may have."""
        self._others = others
        self._most_shared = most_shared
        self._unpacked_bytes = unpacked_bytes
        self._interpreted = interpreted
        self._said: set[str] = set()
        self._ways: dict[object, Way] = {}
        self._checked: Seen[bool] = Seen()
        self._ordered: torch.Tensor | None = None
        self._kernels: tuple[TritonLaunches, TritonLaunches] | None = None

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
        operands = (q, inputs.cu_seqlens, inputs.block_tables, inputs.cache_lens, *(() if out is None else (out,)))
        like = pages.kept(_shape), inputs.max_context
        if placed is not None or self._checked.of(operands, like) is None:
            check_paged_attention(q, pages, inputs, out, placed, dtypes=ACTIVATIONS)
            self._checked.note(True, operands, like)
        y = q.new_empty((*q.shape[:2], pages.v_dim)) if out is None else out
        unfit = self._unfit(pages, placed)
        if unfit is not None:
            if unfit not in self._said:
                self._said.add(unfit)
                logger.warning("paged_attention: no Triton kernel for %s; torch does the work, which is slower", unfit)
            return self._others(q, pages, inputs, scale, y, placed=placed)
        if y.numel():
            self._launch(q, y, pages, inputs, scale=scale, placed=placed)
        return y

    def _unfit(self, pages: LayerPages, placed: PlacedFrame | None) -> str | None:
        """Why the kernel does not read such pages here, if so."""
        widest = max(pages.k_dim, pages.v_dim)
        if pages.mode not in MODES:
            return f"pages of {pages.mode}"
        if widest > LARGEST_HEAD:
            return f"heads of more than {LARGEST_HEAD} elements"
        centred = pages.quantised and placed is not None and placed.frame.centre is not None
        if widest > USUAL_HEAD and (centred or pages.mode == "int4") and self._most_shared < HOPPER_SHARED:
            return f"{pages.mode} heads of {widest} elements in {self._most_shared} bytes of shared memory"
        return None

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
        ratio, batch = q.shape[1] // pages.num_heads, inputs.cache_lens.shape[0]
        centre, cos_sin, rotary = None, None, 0
        if pages.quantised and placed is not None and placed.frame.centre is not None:
            centre, cos_sin = placed.frame.centre, placed.cos_sin
            rotary = cos_sin.shape[1]
        prompts = inputs.max_seqlen > 1
        page, room = 0, 0
        if pages.quantised and prompts:
            page = _page_bytes(pages, centred=centre is not None)
            room = batch * -(-inputs.max_context // pages.block_size) * page
        unpacked = 0 < room <= self._unpacked_bytes
        key = pages.kept(_shape), ratio, rotary, prompts, unpacked
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = _way(
                pages, ratio, rotary, prompts=prompts, unpacked=unpacked, most_shared=self._most_shared
            )  # fmt: skip
        if unpacked:
            plain = torch.empty(room, dtype=torch.uint8, device=q.device)
            self._unpack((plain, page), pages, inputs, (centre, cos_sin), (way, key))
            k_bytes, v_bytes = way.unpacked_bytes
            stores: Stores = (plain, plain[k_bytes + v_bytes :] if rotary else None, plain[k_bytes:], None, None, page)
            blocks = -(-inputs.max_context // pages.block_size)
            tables, columns = self._numbers(batch * blocks, q.device), blocks
            centre, cos_sin = None, None
        else:
            k, v, k_scale, v_scale = pages.kept(_bytes)
            stores = (k, None, v, k_scale, v_scale, pages.k.stride(0) * pages.k.element_size())
            tables, columns = inputs.block_tables, inputs.block_tables.stride(0)
        rows = way.cut["BM"]
        tiles = min(-(-q.shape[0] * ratio // rows) + batch, batch * -(-inputs.max_seqlen * ratio // rows))
        tile, _ = self._compiled()
        tile(
            (tiles, pages.num_heads, 1),
            (
                q, q.stride(0), *stores, tables, columns, inputs.cu_seqlens, inputs.cache_lens, batch, scale, out,
                centre, cos_sin,
            ),
            way.constants | {"UPCAST": self._interpreted}, way.options, key,
        )  # fmt: skip

    def _unpack(
        self,
        made: tuple[torch.Tensor, int],
        pages: LayerPages,
        inputs: ForwardInputs,
        centred: tuple[torch.Tensor | None, torch.Tensor | None],
        known: tuple[Way, object],
    ) -> None:
        """Write the step's contexts in bfloat16 into `made`, memory and the bytes of its pages, one after the other;
        with each the rests of its keys if their centre was put back.
        """
        way, key = known
        k, v, k_scale, v_scale = pages.kept(_bytes)
        tables, blocks = inputs.block_tables, -(-inputs.max_context // pages.block_size)
        _, unpack = self._compiled()
        unpack(
            (-(-inputs.max_context // _UNPACKED_TOKENS), pages.num_heads, inputs.cache_lens.shape[0]),
            (
                k, v, k_scale, v_scale, pages.k.stride(0) * pages.k.element_size(), tables, tables.stride(0),
                inputs.cu_seqlens, inputs.cache_lens, *centred, *made, blocks,
            ),
            way.unpacking | {"BN": _UNPACKED_TOKENS, "UPCAST": self._interpreted}, {}, key,
        )  # fmt: skip

    def _compiled(self) -> tuple[TritonLaunches, TritonLaunches]:
        """The kernel that attends and the one that unpacks; Triton is imported where one is launched."""
        if self._kernels is None:
            from deepseek_tgi.kernels.paged_attention.tile_kernel import paged_tile, unpack_pages

            self._kernels = TritonLaunches(paged_tile), TritonLaunches(unpack_pages)
        return self._kernels

    def _numbers(self, count: int, device: torch.device) -> torch.Tensor:
        """0, 1, 2 ... up to `count` or beyond: a table of pages that lie in order."""
        if self._ordered is None or self._ordered.shape[0] < count or self._ordered.device != device:
            self._ordered = torch.arange(max(2 * count, _LEAST_NUMBERS), dtype=torch.int32, device=device)
        return self._ordered


Stores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]
"""Keys, their rests, values, scales of both, bytes from a page to the next."""


@dataclass(frozen=True, slots=True)
class Way:
    """How steps over pages of one shape are read: constants of the kernel that attends, with its cut and options, and
    of the one that unpacks, with the bytes of keys and of values in a page of what it makes.
    """

    constants: dict[str, Any]
    cut: dict[str, int]
    options: dict[str, int]
    unpacking: dict[str, Any]
    unpacked_bytes: tuple[int, int]


def _way(
    pages: LayerPages, ratio: int, rotary: int, *, prompts: bool, unpacked: bool, most_shared: int
) -> Way:  # fmt: skip
    stored = tile_constants(pages, 1, rotary)
    names: tuple[str, ...] = ("MODE", "BLOCK", "CENTRE", "ROTARY", "MARK")
    names += tuple(f"{key}{x}" for key in ("D", "P", "GROUP_", "SIZE_", "TURN_") for x in "KV")
    heads, size, rest = pages.num_heads, pages.block_size, unpacked and rotary > 0
    if unpacked:
        k, v = (
            torch.empty(0, heads, size, dim, dtype=torch.bfloat16, device="meta") for dim in (pages.k_dim, pages.v_dim)
        )
        pages, rotary = LayerPages(k, v, None, None, "bfloat16", size), 0
    centred, parts = rotary > 0, 1 + rest
    rows = None if prompts else ratio
    cut = tile_shape(pages, rows, centred=centred, parts=parts, most_shared=most_shared)
    return Way(
        constants=tile_constants(pages, ratio, rotary) | {"BM": cut["BM"], "BN": cut["BN"], "REST": rest},
        cut=cut,
        options={name: cut[name] for name in ("num_warps", "num_stages")},
        unpacking={name: stored[name] for name in names},
        unpacked_bytes=(2 * heads * size * pages.k_dim, 2 * heads * size * pages.v_dim),
    )


def _page_bytes(pages: LayerPages, *, centred: bool) -> int:
    """Of a page in bfloat16, with the rests of its keys if they are `centred`."""
    elements = pages.k_dim + pages.v_dim + (pages.k_dim if centred else 0)
    return -(-2 * pages.num_heads * pages.block_size * elements // 16) * 16


def _shape(pages: LayerPages) -> tuple[object, ...]:
    """What of pages decides how they are read."""
    marks = None if pages.k_scale is None else (pages.k_scale.dtype, pages.k_scale.shape[3])
    return pages.mode, pages.num_heads, pages.k_dim, pages.v_dim, pages.block_size, marks


def _bytes(pages: LayerPages) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Its parts as the kernels take them, whatever they hold."""
    scales = (None if scale is None else scale.view(torch.uint8) for scale in (pages.k_scale, pages.v_scale))
    k_scale, v_scale = scales
    return pages.k.view(torch.uint8), pages.v.view(torch.uint8), k_scale, v_scale


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


def tile_shape(
    pages: LayerPages, rows: int | None, *, centred: bool, parts: int = 1, most_shared: int = HOPPER_SHARED
) -> dict[str, int]:
    """How many rows and keys, of `parts` parts, a program takes, for requests of at most `rows` rows.

    Prompts of any length (None) have one shape: another is another kernel to compile while a request waits.
    """
    large, roomy = max(pages.k_dim, pages.v_dim) > USUAL_HEAD, most_shared >= PROMPT_SHARED
    wide = large or centred or pages.mode == "int4"
    most = 64 if wide else 128
    size = most if rows is None or rows > 16 else 16
    many = size >= 128 and parts == 1 and pages.mode in ("bfloat16", "float16") and roomy
    keys = 32 if wide else 128 if many else 64
    single = pages.mode == "int4" or (centred and (large or not roomy))
    stages = 1 if single else 2 if wide or size >= 128 else 3
    return {"BM": size, "BN": keys, "num_warps": 8 if size >= 128 else 4, "num_stages": stages}


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
