"""From the residual stream to raw logits, for the rows that are wanted and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.parallel import RankGroup


@dataclass(frozen=True, slots=True)
class Head:
    """Final norm and output matrix `[V, H]`; with a `group`, each rank has `widths[rank]` rows of the matrix."""

    norm: RmsNorm
    matrix: Linear
    widths: Sequence[int]
    group: RankGroup | None = None
    dtype: torch.dtype = torch.float32
    """Of activations; the logits are float32."""

    @property
    def vocab_size(self) -> int:
        """V."""
        return sum(self.widths)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix and the norm."""
        return self.norm.nbytes + self.matrix.nbytes

    def __call__(self, hidden: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[R, V] float32`, owned by the caller, of `hidden[rows]`; `rows [R]` ascending and distinct.

        `hidden [T, H]` is used up. Every rank gets the same bits. `out` is written to, and returned, where one kernel
        makes the whole of it.
        """
        if rows.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, rows)
        width = self.widths[0 if self.group is None else self.group.rank]
        own = hidden.new_empty(hidden.shape[0], width) if out is None or self.group is not None else out
        normed = hidden if self.dtype == hidden.dtype else torch.empty_like(hidden, dtype=self.dtype)
        self.matrix(self.norm(hidden, normed), None, own)
        return own if self.group is None else self.group.gather_columns(own, self.widths, out)
