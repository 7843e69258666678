"""Latent attention in float32, one query token and head at a time, each form as its formula has it."""

from __future__ import annotations

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.latent_attention import PackedUp, check_latent_attention, takes_expanded
from deepseek_tgi.kernels.latent_format import dequantise_latent
from deepseek_tgi.kernels.pages import LatentPages


class PlainUp(PackedUp):
    """`rows [H, Dn + Dv, R]`, float32."""

    __slots__ = ("rows",)

    def __init__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> None:
        self.rows = weight.float().view(num_heads, -1, weight.shape[1])
        super().__init__(num_heads, nope_dim, self.rows.shape[1] - nope_dim, weight.shape[1], self.rows.nbytes)


def _context(pages: LatentPages, blocks: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `0:length` of one request: latents `[L, R]` and rotary keys `[L, Dr]`."""
    latents, ropes = [], []
    for position in range(length):
        block, place = blocks[position // pages.block_size], position % pages.block_size
        stored, scale = pages.latent[block, place], pages.scale
        if scale is None:
            latents.append(stored.float())
        else:
            latents.append(dequantise_latent(stored, scale[block, place], pages.mode))
        ropes.append(pages.rope[block, place].float())
    return torch.stack(latents), torch.stack(ropes)


def latent_attention(
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
    assert isinstance(up, PlainUp)
    check_latent_attention(q, pages, up, inputs, out=out, form=form)
    starts, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
    for b, blocks in enumerate(inputs.block_tables.tolist()):
        tokens = starts[b + 1] - starts[b]
        attend = _expanded if takes_expanded(form, tokens, cached[b], up, pages.rope_dim) else _absorbed
        for t in range(starts[b], starts[b + 1]):
            latent, rope = _context(pages, blocks, cached[b] + t - starts[b] + 1)
            for head in range(up.num_heads):
                out[t, head] = attend(q[t, head], latent, rope, up.rows[head], scale)
    return out


def _expanded(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """The key at a position is its rotary key and the first rows of `up` times its latent, the value the other rows."""
    made = latent @ up.t()
    nope = q.shape[0] - rope.shape[1]
    keys = torch.cat((rope, made[:, :nope]), 1)
    return torch.softmax(keys @ q * scale, 0) @ made[:, nope:]


def _absorbed(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """The query goes into latent space, the weighted sum of latents out of it."""
    rotary, rest = q[: rope.shape[1]], q[rope.shape[1] :]
    scores = rope @ rotary + latent @ (rest @ up[: rest.shape[0]])
    return up[rest.shape[0] :] @ (torch.softmax(scores * scale, 0) @ latent)
