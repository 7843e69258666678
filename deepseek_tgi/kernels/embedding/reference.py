"""Row lookup, one id at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import PackedDense
from deepseek_tgi.kernels.embedding import check_embedding


def embedding(ids: torch.Tensor, table: torch.Tensor | PackedDense) -> torch.Tensor:
    """See the contract."""
    dense = table.dense() if isinstance(table, PackedDense) else table
    check_embedding(ids, dense.shape[0])
    y = torch.empty((ids.shape[0], dense.shape[1]))
    for t in range(ids.shape[0]):
        y[t] = dense[int(ids[t])].float()
    return y
