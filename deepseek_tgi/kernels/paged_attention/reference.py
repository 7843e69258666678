"""Paged attention, one query token and one head at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.int8_format import dequantise_rows
from deepseek_tgi.kernels.paged_attention import check_paged_attention
from deepseek_tgi.kernels.pages import LayerPages


def _context(
    store: torch.Tensor, scales: torch.Tensor | None, blocks: list[int], length: int, head: int
) -> torch.Tensor:
    """Positions `0:length` of one KV head as `[length, D] float32`."""
    size = store.shape[2]
    rows = []
    for position in range(length):
        block, place = blocks[position // size], position % size
        row = store[block, head, place]
        rows.append(row.float() if scales is None else dequantise_rows(row, scales[block, head, place]))
    return torch.stack(rows)


def paged_attention(
    q: torch.Tensor,
    pages: LayerPages,
    inputs: ForwardInputs,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    check_paged_attention(q, pages, inputs, out)
    y = torch.empty((q.shape[0], q.shape[1], pages.v.shape[3])) if out is None else out
    ratio = q.shape[1] // pages.k.shape[1]
    starts, cached = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
    for b, blocks in enumerate(inputs.block_tables.tolist()):
        for t in range(starts[b], starts[b + 1]):
            length = cached[b] + t - starts[b] + 1
            for head in range(q.shape[1]):
                keys = _context(pages.k, pages.k_scale, blocks, length, head // ratio)
                values = _context(pages.v, pages.v_scale, blocks, length, head // ratio)
                weights = torch.softmax((keys @ q[t, head]) * scale, 0)
                y[t, head] = weights @ values
    return y
