"""A prompt's attention over keys and values made from its context's latents, which torch's attention then runs over.

Choice: one kernel brings the context out of its pages and puts the rotary key into every head's key; both products
write where attention reads. Prevents: a dozen operators a layer to turn pages into rows, and keys that are copied to
be joined: short prompts were bound by the host's launches. Rejected: a kernel for the attention as well, since torch's
runs at the speed of the matrix units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from deepseek_tgi.kernels.cuda.program import KernelSpec, Programs, spec
from deepseek_tgi.kernels.latent_attention.decode import GROUPS, HOPPER, MODES, RANK, ROPE, page_bytes, unfit
from deepseek_tgi.kernels.latent_attention.plain import read_context
from deepseek_tgi.kernels.pages import LatentPages

if TYPE_CHECKING:
    from deepseek_tgi.kernels.latent_attention.cuda import CudaUp

ELEMENTS_AT_ONCE = 1 << 28
"""Expanded keys and values that are held at a time, about: heads beyond take their turn."""
_WARPS = 4
_SIGNATURE = "ppplpippii"


def unpack_spec(mode: str, block_size: int) -> KernelSpec:
    """The kernel that brings a context out of its pages."""
    return spec(
        "latent_unpack", "latent_unpack", _SIGNATURE, MODE=MODES[mode], RANK=RANK, ROPE=ROPE,
        GROUP=GROUPS.get(mode, RANK), BLOCK=block_size,
    )  # fmt: skip


class ExpandedAttention:
    """The last tokens of one request over all of its context, causal."""

    def __init__(self, programs: Programs, capability: int = 0) -> None:
        self._programs = programs
        self._hopper = capability == HOPPER

    def __call__(
        self,
        q: torch.Tensor,
        pages: LatentPages,
        table: torch.Tensor,
        length: int,
        up: CudaUp,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """`q [n, H, Dr + Dn]` and `out [n, H, Dv]` in bfloat16, the last tokens of a context of `length` in the pages
        that `table [P] int32` names.
        """
        width = pages.rope_dim + up.nope_dim
        padded = max(width, up.v_dim)
        step = max(1, min(up.num_heads, ELEMENTS_AT_ONCE // (2 * length * padded)))
        # Values as wide as keys would cost cuDNN a tenth where nothing is cached before; other attention wants them so.
        held = up.v_dim if self._hopper and len(q) == length and up.v_dim < width else padded
        keys = torch.empty(length, step, padded, dtype=torch.bfloat16, device=q.device)
        values = torch.empty(length, step, held, dtype=torch.bfloat16, device=q.device)
        if padded > width:
            keys[..., width:].zero_()
        if held > up.v_dim:
            values[..., up.v_dim :].zero_()
        latent = self._context(pages, table, length, keys)
        for first in range(0, up.num_heads, step):
            heads = slice(first, min(first + step, up.num_heads))
            count = heads.stop - first
            every = latent.expand(count, -1, -1)
            own, below = keys[:, :count], values[:, :count]
            made = own[..., pages.rope_dim : width].transpose(0, 1)
            torch.bmm(every, up.keys[heads].transpose(1, 2), out=made)
            torch.bmm(every, up.values[heads].transpose(1, 2), out=below[..., : up.v_dim].transpose(0, 1))
            given = q[:, heads] if padded == width else pad(q[:, heads], (0, padded - width))
            y = _attend(given, own, below, scale)
            out[:, heads] = y[..., : up.v_dim]

    def _context(self, pages: LatentPages, table: torch.Tensor, length: int, keys: torch.Tensor) -> torch.Tensor:
        """The latents `[L, R]` bfloat16; every head of `keys [L, h, W]` gets the rotary key."""
        if unfit(pages) is not None:
            latent, rope = read_context(pages, table, length, torch.bfloat16)
            keys[..., : pages.rope_dim] = rope.unsqueeze(1)
            return latent
        latent = torch.empty(length, RANK, dtype=torch.bfloat16, device=keys.device)
        self._programs.kernel(unpack_spec(pages.mode, pages.block_size))(
            (-(-length // _WARPS), 1, 1), 32 * _WARPS,
            (
                pages.latent, pages.rope, pages.scale, page_bytes(pages), table, length, latent, keys, keys.shape[1],
                keys.shape[2],
            ), overlap=True,
        )  # fmt: skip
        return latent


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """`[n, H, Wv]` of `q [n, H, W]`, the last rows of `keys [L, H, W]` and `values [L, H, Wv]`."""
    rows, length = q.shape[0], keys.shape[0]
    q, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
    if rows == length:
        y = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale)
    else:
        y = scaled_dot_product_attention(q, keys, values, attn_mask=causal_lower_right(rows, length), scale=scale)
    return y[0].transpose(0, 1)
