"""Paged attention with torch's operators: whole decode batches at once, prompts one request at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.paged_attention import check_paged_attention
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.vector_store import read_keys, read_vectors

_QUERY_TILE = 256


def _gather(store: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks `[..., P]` of all KV heads as they lie, `[..., G, P * S, W]`."""
    rows = store[blocks].transpose(-4, -3)  # [..., G, P, S, W]
    return rows.reshape(*rows.shape[:-3], rows.shape[-3] * rows.shape[-2], rows.shape[-1])


def _context(
    pages: LayerPages, blocks: torch.Tensor, length: int, placed: PlacedFrame | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `length` positions in `blocks [..., P]`: `[..., G, length, D] float32`."""
    stores = (pages.k, pages.k_scale, pages.v, pages.v_scale)
    k, k_scale, v, v_scale = (None if s is None else _gather(s, blocks)[..., :length, :] for s in stores)
    assert k is not None
    assert v is not None
    return read_keys(pages, k, k_scale, placed), read_vectors(pages.mode, v, v_scale)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """`q [B, G, R, D]`, `k`/`v [B, G, L, D]`, `visible [B, 1, R, L]` -> `[B, G, R, Dv]`."""
    scores = (q * scale) @ k.transpose(-1, -2)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
    # Places never written hold whatever memory held, NaN included, and 0 * NaN is NaN.
    return weights @ v.masked_fill(~visible.any(-2).unsqueeze(-1), 0.0)


def _decode(
    q: torch.Tensor, pages: LayerPages, inputs: ForwardInputs, scale: float, placed: PlacedFrame | None
) -> torch.Tensor:
    heads = pages.num_heads
    blocks = inputs.block_tables[:, : -(-inputs.max_context // pages.block_size)].long()
    k, v = _context(pages, blocks, inputs.max_context, placed)
    columns = torch.arange(k.shape[2], device=q.device)
    visible = (columns <= inputs.cache_lens.unsqueeze(1))[:, None, None, :]
    y = _attend(q.reshape(q.shape[0], heads, -1, q.shape[2]), k, v, visible, scale)
    return y.reshape(q.shape[0], q.shape[1], v.shape[3])


def _prompt(
    q: torch.Tensor, pages: LayerPages, blocks: torch.Tensor, cached: int, *, scale: float, placed: PlacedFrame | None
) -> torch.Tensor:
    """One request's queries `[n, H, D]`, in tiles so that the scores stay small."""
    heads, ratio = pages.num_heads, q.shape[1] // pages.num_heads
    total = cached + q.shape[0]
    used = blocks[: -(-total // pages.block_size)].long()
    k, v = (x.unsqueeze(0) for x in _context(pages, used, total, placed))
    columns = torch.arange(total, device=q.device)
    parts: list[torch.Tensor] = []
    for tile in torch.split(q, _QUERY_TILE):
        n, seen = tile.shape[0], cached + sum(p.shape[0] for p in parts)
        grouped = tile.reshape(n, heads, ratio, -1).permute(1, 2, 0, 3).reshape(1, heads, ratio * n, -1)
        limit = torch.arange(seen, seen + n, device=q.device).repeat(ratio)
        end = seen + n
        visible = (columns[:end] <= limit.unsqueeze(1))[None, None]
        y = _attend(grouped, k[:, :, :end], v[:, :, :end], visible, scale)
        parts.append(y.view(heads, ratio, n, -1).permute(2, 0, 1, 3).reshape(n, heads * ratio, -1))
    return torch.cat(parts)


def paged_attention(
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
    y = q.new_empty((q.shape[0], q.shape[1], pages.v_dim)) if out is None else out
    if q.shape[0] == 0:
        return y
    q = q.float()
    if inputs.max_seqlen == 1 and q.shape[0] == inputs.cache_lens.shape[0]:
        y.copy_(_decode(q, pages, inputs, scale, placed))
        return y
    starts, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
    for b, blocks in enumerate(inputs.block_tables):
        start, stop = starts[b], starts[b + 1]
        if stop > start:
            y[start:stop] = _prompt(q[start:stop], pages, blocks, cached[b], scale=scale, placed=placed)
    return y
