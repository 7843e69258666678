"""The INT8 number format of cached keys and values, in plain torch.

`q = round_half_even((x - zero) / scale)` as uint8, with `zero` and `scale` in float16, one pair for each vector (token
and KV head). `zero` is the minimum rounded *down* to float16 and `scale` is `(max - zero) / 255` rounded *up*, both as
stored, so no element is clipped. Prevents: rounding the minimum to nearest clips a vector with a large common offset
(100 +- 0.01 in float16 steps of 0.06). Rejected: symmetric int8, which loses a bit on the offset keys of Qwen2.
"""

from __future__ import annotations

import torch

HALF_MAX = 65504.0
LEVELS = 255.0


def half_towards(x: torch.Tensor, up: bool) -> torch.Tensor:
    """float32 to float16, rounded towards +inf (`up`) or -inf, for `|x| <= 65504`; NaN stays NaN."""
    nearest = x.to(torch.float16)
    overshoots = nearest.float() < x if up else nearest.float() > x
    bits = nearest.view(torch.int16)
    negative = bits < 0
    # Moving away from zero adds one to the bit pattern, towards zero subtracts one; +-0 steps to the smallest value.
    away = negative != up
    stepped = torch.where(away, bits + 1, bits - 1)
    is_zero = (bits & 0x7FFF) == 0
    smallest = torch.full_like(bits, 1 if up else -0x7FFF)
    stepped = torch.where(is_zero, smallest, stepped)
    return torch.where(overshoots, stepped, bits).view(torch.float16)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise vectors along the last axis.

    Shapes: `x [..., D] float32` -> `q [..., D] uint8`, `params [..., 2] float16` (scale, zero). Values beyond float16
    saturate at +-65504. A vector holding NaN gets a NaN zero, so that it reads back as NaN instead of as numbers.
    """
    x = x.float().clamp(-HALF_MAX, HALF_MAX)
    zero = half_towards(x.amin(-1), up=False)
    span = x.amax(-1) - zero.float()
    scale = half_towards(span / LEVELS, up=True)
    step = scale.float().unsqueeze(-1)
    steps = (x - zero.float().unsqueeze(-1)) / torch.where(step > 0, step, 1.0)
    q = torch.nan_to_num(steps).round().clamp(0, LEVELS).to(torch.uint8)
    return q, torch.stack((torch.nan_to_num(scale), zero), -1)


def dequantise_rows(q: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantise_rows`: `q [..., D] uint8`, `params [..., 2] float16` -> `[..., D] float32`."""
    pair = params.float()
    return q.float() * pair[..., :1] + pair[..., 1:]
