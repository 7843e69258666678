"""Rotary embedding, one token and one pair of elements at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.rope import check_rope


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """See the contract."""
    check_rope(q, k, positions, cos_sin)
    half = cos_sin.shape[1] // 2
    for t in range(q.shape[0]):
        row = cos_sin[int(positions[t])]
        for x in (q, k):
            for i in range(half):
                first, second = x[t, :, i].clone(), x[t, :, i + half].clone()
                x[t, :, i] = first * row[i] - second * row[i + half]
                x[t, :, i + half] = second * row[i] + first * row[i + half]
