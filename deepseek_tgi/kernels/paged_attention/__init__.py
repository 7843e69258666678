"""Causal grouped-query attention over the paged cache; prefill, chunks and decode are the same call.

`paged_attention(q [T, H, D], pages, inputs, scale, out, placed) -> [T, H, Dv]`, q and out activations. Query `i` of
request `b` stands at position `cache_lens[b] + i` and sees positions 0 to its own, read from the pages only (so
`kv_write` of the step comes first). Query head `h` reads KV head `h // (H / G)`. Softmax and sums are float32. Keys and
values are read as stored, whatever the chunking; `placed` brings the frame they were written in, if any (its positions
are not looked at: a key's is its place in the context). q may be a strided view with dense heads; out is dense.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import FLOAT32, Dtypes, describe, named, refuse
from deepseek_tgi.kernels.frame import PlacedFrame, check_frame
from deepseek_tgi.kernels.pages import LayerPages

__all__ = ["PagedAttention", "check_paged_attention"]


class PagedAttention(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        scale: float,
        out: torch.Tensor | None = None,
        *,
        placed: PlacedFrame | None = None,
    ) -> torch.Tensor: ...


def check_paged_attention(
    q: torch.Tensor,
    pages: LayerPages,
    inputs: ForwardInputs,
    out: torch.Tensor | None,
    placed: PlacedFrame | None,
    *,
    dtypes: Dtypes = FLOAT32,
) -> None:
    """Raise `GenerationError` for operands that do not fit. The values in `inputs` are the engine's promise."""
    heads, width = pages.num_heads, pages.k_dim
    if not (q.dim() == 3 and q.dtype in dtypes and q.shape[2] == width and q.shape[1] % heads == 0):
        refuse(f"paged_attention: got {describe('q', q)}, expected [T, multiple of {heads}, {width}] {named(dtypes)}")
    for name, tensor in (
        ("cu_seqlens", inputs.cu_seqlens),
        ("block_tables", inputs.block_tables),
        ("cache_lens", inputs.cache_lens),
    ):
        if tensor.dtype != torch.int32:
            refuse(f"paged_attention: got {describe(name, tensor)}, expected int32")
    needed = -(-inputs.max_context // pages.block_size)
    if not (inputs.block_tables.shape[1] >= needed or q.shape[0] == 0):
        refuse(
            f"paged_attention: got {describe('block_tables', inputs.block_tables)}, expected {needed} columns or more "
            f"for a context of {inputs.max_context}"
        )
    if out is not None:
        shape = (q.shape[0], q.shape[1], pages.v_dim)
        if not (tuple(out.shape) == shape and out.dtype in dtypes and out.is_contiguous()):
            refuse(f"paged_attention: got {describe('out', out)}, expected {list(shape)} {named(dtypes)}, contiguous")
    if placed is not None:
        check_frame("paged_attention", pages, placed)
        if placed.frame.centre is not None and placed.cos_sin.shape[0] < inputs.max_context:
            refuse(
                f"paged_attention: cos_sin has {placed.cos_sin.shape[0]} positions, the step reaches "
                f"{inputs.max_context}"
            )
