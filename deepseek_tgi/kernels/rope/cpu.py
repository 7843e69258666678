"""Rotary embedding, vectorised."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.rope import check_rope


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """See the contract."""
    check_rope(q, k, positions, cos_sin)
    half = cos_sin.shape[1] // 2
    rows = cos_sin[positions.long()].unsqueeze(1)  # [T, 1, R]
    cos, sin = rows[..., :half], rows[..., half:]
    for x in (q, k):
        first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half] = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin
