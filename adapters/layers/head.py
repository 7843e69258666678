"""From the residual stream to raw logits, for the rows that are wanted and no others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class Head:
    """Final norm and output matrix `[V, H]`."""

    norm: RmsNorm
    matrix: Linear
    vocab_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix and the norm."""
        return self.norm.nbytes + self.matrix.nbytes

    def __call__(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V] float32`, owned by the caller, of `hidden[rows]`; `rows [R]` ascending and distinct.

        `hidden [T, H]` is used up.
        """
        if rows.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, rows)
        logits = hidden.new_empty(hidden.shape[0], self.vocab_size)
        return self.matrix(self.norm(hidden, hidden), None, logits)
