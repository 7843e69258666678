"""Paged attention, one query token and one head at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.paged_attention import check_paged_attention
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.vector_store import read_keys, read_vectors


def _context(
    pages: LayerPages, blocks: list[int], length: int, placed: PlacedFrame | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions `0:length` as `[heads, length, D] float32`, each read once."""
    size = pages.block_size
    keys, values = [], []
    for position in range(length):
        at = blocks[position // size], slice(None), slice(position % size, position % size + 1)
        k_scale, v_scale = (None if s is None else s[at] for s in (pages.k_scale, pages.v_scale))
        keys.append(read_keys(pages, pages.k[at], k_scale, placed, position)[:, 0])
        values.append(read_vectors(pages.mode, pages.v[at], v_scale)[:, 0])
    return torch.stack(keys, 1), torch.stack(values, 1)


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
    check_paged_attention(q, pages, inputs, out, placed)
    y = torch.empty((q.shape[0], q.shape[1], pages.v_dim)) if out is None else out
    ratio = q.shape[1] // pages.num_heads
    starts, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
    for b, blocks in enumerate(inputs.block_tables.tolist()):
        rows = range(starts[b], starts[b + 1])
        if not rows:
            continue
        keys, values = _context(pages, blocks, cached[b] + len(rows), placed)
        for t in rows:
            length = cached[b] + t - starts[b] + 1
            for head in range(q.shape[1]):
                weights = torch.softmax((keys[head // ratio, :length] @ q[t, head]) * scale, 0)
                y[t, head] = weights @ values[head // ratio, :length]
    return y
