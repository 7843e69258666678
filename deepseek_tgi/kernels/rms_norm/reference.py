"""RMS norm, one row at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.rms_norm import check_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the contract."""
    check_rms_norm(x, weight, out)
    y = torch.empty(x.shape) if out is None else out
    for index in range(x.shape[0]):
        row = x[index].clone()
        y[index] = row / torch.sqrt((row * row).mean(-1, keepdim=True) + eps) * weight
    return y
