"""Row lookup, vectorised."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import PackedDense
from deepseek_tgi.kernels.embedding import check_embedding


def embedding(ids: torch.Tensor, table: torch.Tensor | PackedDense) -> torch.Tensor:
    """See the contract."""
    if isinstance(table, PackedDense):
        check_embedding(ids, table.out_features)
        return table.rows(ids)
    check_embedding(ids, table.shape[0])
    return table[ids].float()
