"""Latent attention on the C++ library, as `native/latent_absorbed.cpp` and `native/latent_expanded.cpp` explain.

The up-projection is held once, in tiles that both forms read: float32 under float32 compute, bfloat16 under bfloat16
compute. There it is exact for weights that the checkpoint has in bfloat16; others are off by as much as rounding every
activation to bfloat16 would give. Queries, latents, scores and sums are float32 in both.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ComputeDtype, describe, refuse
from deepseek_tgi.kernels.latent_attention import PackedUp, check_latent_attention, takes_expanded
from deepseek_tgi.kernels.library import LatentCall, NativeLibrary, UpWeight
from deepseek_tgi.kernels.native_latents import native_latents
from deepseek_tgi.kernels.pages import LatentPages

_TILE, _LANES = 64, 16


class NativeUp(PackedUp):
    """Keys `[H, R / 64, Dn, 64]` and values `[H, Dv / 64, R, 64]`, the last tile of a head narrower."""

    __slots__ = ("_parts", "_struct", "address")

    def __init__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> None:
        rank = weight.shape[1]
        rows = weight.view(num_heads, -1, rank)
        v_dim = rows.shape[1] - nope_dim
        v_pad = -(-v_dim // _LANES) * _LANES
        values = torch.nn.functional.pad(rows[:, nope_dim:].transpose(1, 2), (0, v_pad - v_dim))
        self._parts = tuple(in_tiles(part) for part in (rows[:, :nope_dim], values))
        kind = 0 if weight.dtype == torch.float32 else 1
        self._struct = UpWeight(num_heads, nope_dim, v_dim, v_pad, rank, kind, *(p.data_ptr() for p in self._parts))
        self.address = ctypes.addressof(self._struct)
        super().__init__(num_heads, nope_dim, v_dim, rank, sum(part.nbytes for part in self._parts))


def in_tiles(matrix: torch.Tensor) -> torch.Tensor:
    """`[H, rows, columns]` as one run of numbers: for each head its columns in tiles of 64, the last one narrower."""
    tiles = [tile.reshape(matrix.shape[0], -1) for tile in torch.split(matrix, _TILE, 2)]
    return torch.cat(tiles, 1).contiguous()


@dataclass(frozen=True, slots=True)
class UpPacker:
    """Packs for one precision."""

    compute_dtype: ComputeDtype

    def __call__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> PackedUp:
        """See the contract."""
        exact = self.compute_dtype is ComputeDtype.FLOAT32
        return NativeUp(weight.to(torch.float32 if exact else torch.bfloat16), num_heads, nope_dim)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Operands that were checked, and the C struct made of them. Keeps the tensors alive as long as their addresses."""

    q: torch.Tensor
    out: torch.Tensor
    inputs: ForwardInputs
    facts: tuple[object, ...]
    forms: torch.Tensor | None
    struct: LatentCall
    address: int
    slow: bool


class LatentAttentionOp:
    """The op over one library. Owner of the binding of the last call; one step at a time, as a model runs.

    Layers of a step pass the same `inputs` and usually the same buffers: what was checked for one holds for the next.
    """

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._bound: _Bound | None = None

    def __call__(
        self,
        q: torch.Tensor,
        pages: LatentPages,
        up: PackedUp,
        inputs: ForwardInputs,
        *,
        scale: float,
        out: torch.Tensor,
        form: str = "auto",
    ) -> torch.Tensor:
        """See the contract."""
        assert isinstance(up, NativeUp)
        bound = self._bound
        facts = (pages.latent.shape, pages.rope_dim, up.num_heads, up.nope_dim, up.v_dim, up.rank, scale, form)
        if (
            bound is None
            or bound.q is not q
            or bound.out is not out
            or bound.inputs is not inputs
            or bound.facts != facts
        ):
            check_latent_attention(q, pages, up, inputs, out=out, form=form)
            bound = self._bind((q, out), pages, up, inputs, facts)
            self._bound = bound
        handle = self.library.slow if bound.slow else self.library.quick
        handle.dstgi_latent_attention(native_latents(pages).address, up.address, bound.address)
        return out

    def _bind(
        self,
        operands: tuple[torch.Tensor, torch.Tensor],
        pages: LatentPages,
        up: NativeUp,
        inputs: ForwardInputs,
        facts: tuple[object, ...],
    ) -> _Bound:
        q, out = operands
        if q.stride(2) != 1 or q.stride(1) != q.shape[2] or inputs.block_tables.stride(1) != 1:
            refuse(f"latent_attention: {describe('q', q)} has strides {q.stride()}, expected dense heads")
        *_, scale, form = facts
        forms = choose_forms(str(form), inputs, up, pages.rope_dim)
        struct = LatentCall(
            q.data_ptr(), out.data_ptr(), inputs.cu_seqlens.data_ptr(), inputs.block_tables.data_ptr(),
            inputs.cache_lens.data_ptr(), None if forms is None else forms.data_ptr(), inputs.cache_lens.shape[0],
            inputs.block_tables.stride(0), q.stride(0), self.num_threads, scale,
        )  # fmt: skip
        products = q.shape[0] * up.num_heads * (2 * up.rank + pages.rope_dim) * inputs.max_context
        slow = self.library.handle(products) is self.library.slow
        return _Bound(q, out, inputs, facts, forms, struct, ctypes.addressof(struct), slow)


def choose_forms(form: str, inputs: ForwardInputs, up: PackedUp, rope_dim: int) -> torch.Tensor | None:
    """`[B] uint8`, 1 for a request computed over expanded keys and values; None if none is."""
    if inputs.max_seqlen < 2 or form == "absorbed":
        return None
    starts, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
    chosen = [takes_expanded(form, starts[b + 1] - starts[b], cached[b], up, rope_dim) for b in range(len(cached))]
    return torch.tensor(chosen, dtype=torch.uint8) if any(chosen) else None
