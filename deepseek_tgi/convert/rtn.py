"""Round-to-nearest 4-bit quantisation of one weight matrix, group by group.

Choice: of a few shrunk ranges, each group keeps the one whose rounded weights are closest in squared error, for a
single far value would otherwise coarsen the steps of its whole group. Rejected: plain minimum and maximum (the first of
the candidates), which is what "round to nearest" often means and costs perplexity for nothing.
"""

from __future__ import annotations

import torch

from deepseek_tgi.adapters.awq.format import Int4Weight

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
_LEVELS = 15
_MIN_SCALE = 2.0**-24
"""The smallest float16: a group of zeros still has a scale to divide by."""
_WEIGHTS_AT_ONCE = 1 << 20
"""Weights treated at once: bounds temporary memory and keeps it in cache."""


def quantise_matrix(weight: torch.Tensor, group_size: int) -> Int4Weight:
    """Quantise `weight [N, K]` asymmetrically. Scales are float16, and codes are the nearest under that very scale."""
    out_features, in_features = weight.shape
    step = max(1, _WEIGHTS_AT_ONCE // in_features)
    parts = [_quantise_rows(weight[row : row + step], group_size) for row in range(0, out_features, step)]
    codes, zeros, scales = (torch.cat(side) for side in zip(*parts, strict=True))
    return Int4Weight(codes.view(out_features, in_features), zeros, scales, group_size)


def _quantise_rows(rows: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = rows.to(torch.float32).reshape(rows.shape[0], -1, group_size)
    # Zero lies inside every range, since a zero point can only be one of the sixteen levels.
    low, high = groups.amin(-1).clamp_(max=0.0), groups.amax(-1).clamp_(min=0.0)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / _LEVELS)).clamp_(min=_MIN_SCALE).to(torch.float16).to(torch.float32)
        zero = torch.round(-low * shrink / scale).clamp_(0, _LEVELS)
        codes = _round(groups, scale, zero)
        error = codes.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).sub_(groups).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    codes = _round(groups, best_scale, best_zero).to(torch.uint8)
    return codes, best_zero.to(torch.uint8), best_scale.to(torch.float16)


def _round(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    codes = torch.round(groups / scale.unsqueeze(-1))
    return codes.add_(zero.unsqueeze(-1)).clamp_(0, _LEVELS)
