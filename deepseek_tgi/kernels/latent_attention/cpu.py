"""Latent attention with torch's operators, one request at a time, in tiles of queries."""

from __future__ import annotations

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.latent_attention import PackedUp, check_latent_attention, prefers_expanded
from deepseek_tgi.kernels.latent_format import dequantise_latent
from deepseek_tgi.kernels.pages import LatentPages

_QUERY_TILE = 128


class TorchUp(PackedUp):
    """`keys [H, Dn, R]` and `values [H, Dv, R]`, float32: one storage that both forms read."""

    __slots__ = ("keys", "values")

    def __init__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> None:
        rows = weight.float().view(num_heads, -1, weight.shape[1])
        self.keys, self.values = rows[:, :nope_dim], rows[:, nope_dim:]
        super().__init__(num_heads, nope_dim, rows.shape[1] - nope_dim, weight.shape[1], rows.nbytes)


def read_context(pages: LatentPages, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `0:length` of the request with `blocks [P]`: latents `[L, R]`, rotary keys `[L, Dr]`, float32."""
    used = blocks[: -(-length // pages.block_size)].long()
    codes = pages.latent[used].flatten(0, 1)[:length]
    rope = pages.rope[used].flatten(0, 1)[:length].float()
    if pages.scale is None:
        return codes.float(), rope
    return dequantise_latent(codes, pages.scale[used].flatten(0, 1)[:length], pages.mode), rope


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
    check_latent_attention(q, pages, up, inputs, out)
    starts, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
    for b, blocks in enumerate(inputs.block_tables):
        start, stop = starts[b], starts[b + 1]
        if stop == start:
            continue
        context = read_context(pages, blocks, cached[b] + stop - start)
        expanded = form == "expanded" or (
            form == "auto" and prefers_expanded(stop - start, cached[b], up, pages.rope_dim)
        )
        attend = _expanded if expanded else _absorbed
        out[start:stop] = attend(q[start:stop] * scale, context, up, cached[b])
    return out


def _expanded(q: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], up: TorchUp, cached: int) -> torch.Tensor:
    latent, rope = context
    keys = torch.cat((rope.expand(up.num_heads, -1, -1), latent @ up.keys.transpose(1, 2)), 2)  # [H, L, Dr + Dn]
    return _softmax_sum(q.transpose(0, 1), keys, latent @ up.values.transpose(1, 2), cached)


def _absorbed(q: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], up: TorchUp, cached: int) -> torch.Tensor:
    latent, rope = context
    heads = q.transpose(0, 1)  # [H, T, Dr + Dn]
    split = rope.shape[1]
    queries = torch.cat((heads[..., :split], heads[..., split:] @ up.keys), 2)
    sums = _softmax_sum(queries, torch.cat((rope, latent), 1), latent, cached)  # [T, H, R]
    return (sums.transpose(0, 1) @ up.values.transpose(1, 2)).transpose(0, 1)


def _softmax_sum(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cached: int) -> torch.Tensor:
    """`q [H, T, D]` over `keys [(H,) L, D]`, `values [(H,) L, Dv]`, causal from `cached` on: `[T, H, Dv]`."""
    parts = []
    columns = torch.arange(keys.shape[-2])
    for start in range(0, q.shape[1], _QUERY_TILE):
        tile = q[:, start : start + _QUERY_TILE]
        end = cached + start + tile.shape[1]
        limit = torch.arange(cached + start, end).unsqueeze(1)
        scores = tile @ keys[..., :end, :].transpose(-1, -2)
        weights = scores.masked_fill(columns[:end] > limit, float("-inf")).softmax(-1)
        parts.append(weights @ values[..., :end, :])
    return torch.cat(parts, 1).transpose(0, 1)
