"""From token ids to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.kernels.common import PackedDense
from deepseek_tgi.kernels.embedding import Embedding as Kernel


@dataclass(frozen=True, slots=True)
class Embedding:
    """Row lookup in `table [rows, H]` (a tensor, or the head's own storage when tied).

    With a `group`, the table holds only `rows` of the vocabulary; every rank then looks up its own, and the sum over
    ranks, of which all but one are zeros, is exact.
    """

    kernel: Kernel
    table: torch.Tensor | PackedDense
    rows: range
    group: RankGroup | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the table; 0 if it is the head's."""
        return self.table.nbytes if isinstance(self.table, torch.Tensor) else 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """`[T, H] float32` of `ids [T] int64`, owned by the caller."""
        if self.group is None:
            return self.kernel(ids, self.table)
        inside = ids - self.rows.start
        foreign = (inside < 0) | (inside >= len(self.rows))
        hidden = self.kernel(inside.masked_fill(foreign, 0), self.table)
        hidden.masked_fill_(foreign.unsqueeze(1), 0.0)
        self.group.all_reduce(hidden)
        return hidden
