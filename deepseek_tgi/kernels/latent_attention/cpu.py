"""Latent attention with torch's operators: decoding requests together, others one by one in tiles of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.latent_attention import PackedUp, check_latent_attention, takes_expanded
from deepseek_tgi.kernels.latent_format import dequantise_latent
from deepseek_tgi.kernels.pages import LatentPages

_QUERY_TILE = 128
_FLOATS_AT_ONCE = 1 << 24
"""Size of the largest temporary, about: heads are expanded, and requests decoded, as many at once as fit."""


class TorchUp(PackedUp):
    """`keys [H, Dn, R]` and `values [H, Dv, R]`, float32: one storage that both forms read."""

    __slots__ = ("keys", "values")

    def __init__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> None:
        rows = weight.float().view(num_heads, -1, weight.shape[1])
        self.keys, self.values = rows[:, :nope_dim], rows[:, nope_dim:]
        super().__init__(num_heads, nope_dim, rows.shape[1] - nope_dim, weight.shape[1], rows.nbytes)


@dataclass(frozen=True, slots=True)
class _Context:
    """What queries attend to: `latent [..., L, R]` and `rope [..., L, Dr]`, float32."""

    latent: torch.Tensor
    rope: torch.Tensor


def read_context(pages: LatentPages, blocks: torch.Tensor, length: int) -> _Context:
    """Positions `0:length` of the requests with `blocks [..., P]`."""
    used = blocks[..., : -(-length // pages.block_size)].long()
    codes, rope = (t[used].flatten(-3, -2)[..., :length, :] for t in (pages.latent, pages.rope))
    if pages.scale is None:
        return _Context(codes.float(), rope.float())
    scale = pages.scale[used].flatten(-3, -2)[..., :length, :]
    return _Context(dequantise_latent(codes, scale, pages.mode), rope.float())


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
    assert isinstance(up, TorchUp)
    check_latent_attention(q, pages, up, inputs, out=out, form=form, dtypes=ACTIVATIONS)
    q = q.float() * scale
    starts, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
    single = [b for b in range(len(cached)) if starts[b + 1] - starts[b] == 1]
    step = max(1, _FLOATS_AT_ONCE // (inputs.max_context * max(pages.rank + pages.rope_dim, 2 * up.num_heads)))
    for first in range(0, len(single), step):
        chosen = torch.tensor(single[first : first + step], device=q.device)
        rows = inputs.cu_seqlens[chosen].long()
        y = _decode(q[rows], pages, up, inputs.block_tables[chosen], inputs.cache_lens[chosen])
        out[rows] = y.to(out.dtype)
    for b in range(len(cached)):
        start, stop = starts[b], starts[b + 1]
        if stop - start < 2:
            continue
        context = read_context(pages, inputs.block_tables[b], cached[b] + stop - start)
        expanded = takes_expanded(form, stop - start, cached[b], up, pages.rope_dim)
        (_expanded if expanded else _absorbed)(q[start:stop], context, up, cached[b], out[start:stop])
    return out


def _decode(
    q: torch.Tensor, pages: LatentPages, up: TorchUp, tables: torch.Tensor, cached: torch.Tensor
) -> torch.Tensor:
    """One query each: `q [B, H, Dr + Dn]` after `cached [B]` tokens; `[B, H, Dv]`."""
    context = read_context(pages, tables, int(cached.max()) + 1)
    beyond = torch.arange(context.rope.shape[1], device=q.device) > cached.unsqueeze(
        1
    )  # [B, L]: not theirs, perhaps never written
    latent = context.latent.masked_fill(beyond.unsqueeze(2), 0.0)
    queries = _absorb(q.transpose(0, 1), up, pages.rope_dim).transpose(0, 1)
    scores = queries @ torch.cat((context.rope, latent), 2).transpose(1, 2)
    sums = scores.masked_fill(beyond.unsqueeze(1), float("-inf")).softmax(-1) @ latent
    return (sums.transpose(0, 1) @ up.values.transpose(1, 2)).transpose(0, 1)


def _absorb(heads: torch.Tensor, up: TorchUp, rope_dim: int) -> torch.Tensor:
    """Queries `[H, T, Dr + Dn]` in latent space, `[H, T, Dr + R]`."""
    return torch.cat((heads[..., :rope_dim], heads[..., rope_dim:] @ up.keys), 2)


def _absorbed(q: torch.Tensor, context: _Context, up: TorchUp, cached: int, out: torch.Tensor) -> None:
    keys = torch.cat((context.rope, context.latent), 1)
    for start in range(0, q.shape[0], _QUERY_TILE):
        tile = slice(start, start + _QUERY_TILE)
        queries = _absorb(q[tile].transpose(0, 1), up, context.rope.shape[1])
        sums = _softmax_sum(queries, keys, context.latent, cached + start)
        out[tile] = (sums @ up.values.transpose(1, 2)).transpose(0, 1)


def _expanded(q: torch.Tensor, context: _Context, up: TorchUp, cached: int, out: torch.Tensor) -> None:
    length = context.rope.shape[0]
    step = max(1, _FLOATS_AT_ONCE // (length * (context.rope.shape[1] + up.nope_dim + up.v_dim)))
    for head in range(0, up.num_heads, step):
        heads = slice(head, head + step)
        made = context.latent @ up.keys[heads].transpose(1, 2)
        keys = torch.cat((context.rope.expand(made.shape[0], -1, -1), made), 2)
        values = context.latent @ up.values[heads].transpose(1, 2)
        for start in range(0, q.shape[0], _QUERY_TILE):
            tile = slice(start, start + _QUERY_TILE)
            out[tile, heads] = _softmax_sum(q[tile, heads].transpose(0, 1), keys, values, cached + start).transpose(
                0, 1
            )


def _softmax_sum(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int) -> torch.Tensor:
    """`q [H, T, D]` from `position` on over `keys [(H,) L, D]`, `values [(H,) L, Dv]`, causal: `[H, T, Dv]`."""
    end = position + q.shape[1]
    later = torch.arange(end, device=q.device) > torch.arange(position, end, device=q.device).unsqueeze(1)
    scores = (q @ keys[..., :end, :].transpose(-1, -2)).masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ values[..., :end, :]
