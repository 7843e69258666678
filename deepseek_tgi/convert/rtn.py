"""Round-to-nearest 4-bit quantisation of one weight matrix, group by group.

Choice: each group's range is its own minimum and maximum. Rejected: ranges shrunk to the least squared error. On
SmolLM2-135M at group 64 they cut the squared error of the weights by 15 % and still raised perplexity (8k tokens of
prose: 16.3 in float16, 21.2 with plain ranges, 22.8 with shrunk ones): the far values they clip are those that count.
"""

from __future__ import annotations

import torch

from deepseek_tgi.adapters.weight_forms import Int4Weight

_LEVELS = 15
_MIN_SCALE, _MAX_SCALE = 2.0**-24, 65504.0
"""The positive range of float16: a group of zeros still has a scale to divide by."""
_WEIGHTS_AT_ONCE = 1 << 20
"""Bounds temporary memory and keeps it in cache."""


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
    scales = ((high - low) / _LEVELS).clamp_(_MIN_SCALE, _MAX_SCALE).to(torch.float16)
    steps = scales.to(torch.float32)
    zeros = torch.round(-low / steps).clamp_(0, _LEVELS)
    codes = torch.round(groups / steps.unsqueeze(-1)).add_(zeros.unsqueeze(-1)).clamp_(0, _LEVELS)
    return codes.to(torch.uint8), zeros.to(torch.uint8), scales
