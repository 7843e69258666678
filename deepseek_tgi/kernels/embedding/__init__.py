"""Row lookup: `embedding(ids [T] int64, table) -> [T, H] f32`.

`table` is a float tensor `[V, H]`, or a packed dense weight when the output head's storage is shared. Ids outside
`[0, V)` raise `GenerationError`: the tokenizer and the checkpoint disagree. On a GPU they are the caller's promise.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import PackedDense, describe, on_host, refuse

__all__ = ["Embedding", "check_embedding"]


class Embedding(Protocol):
    """See the module's docstring."""

    def __call__(self, ids: torch.Tensor, table: torch.Tensor | PackedDense) -> torch.Tensor: ...


def check_embedding(ids: torch.Tensor, rows: int) -> None:
    """Raise `GenerationError` for ids that are not int64 or lie outside the table."""
    if not (ids.dim() == 1 and ids.dtype == torch.int64):
        refuse(f"embedding: got {describe('ids', ids)}, expected [T] int64")
    if ids.numel() and on_host(ids):
        low, high = int(ids.min()), int(ids.max())
        if not (low >= 0 and high < rows):
            refuse(f"embedding: got ids from {low} to {high}, expected 0 to {rows - 1}")
