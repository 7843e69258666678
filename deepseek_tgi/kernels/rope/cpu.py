"""Rotary embedding, vectorised."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.rope import check_rope


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """See the contract."""
    check_rope(q, k, positions, cos_sin, ACTIVATIONS)
    half = cos_sin.shape[1] // 2
    rows = cos_sin[positions.long()].unsqueeze(1)  # [T, 1, R]
    cos, sin = rows[..., :half], rows[..., half:]
    for x in (q, k):
        first, second = (x[..., i * half : (i + 1) * half].to(torch.float32, copy=True) for i in (0, 1))
        x[..., :half] = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin
