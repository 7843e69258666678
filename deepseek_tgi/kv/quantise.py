"""The INT8 number format of cached K/V as its users see it: the two directions and the error they may count on.

The arithmetic itself lives in `kernels.int8_format`, below this package, because the kernels write it.
"""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX, LEVELS, dequantise_rows, quantise_rows

__all__ = ["HALF_MAX", "dequantise_rows", "error_bound", "quantise_rows"]

_HALF_EPS = 2.0**-10
_HALF_TINY = 2.0**-24


def error_bound(x: torch.Tensor) -> torch.Tensor:
    """Largest error of one element after a write and a read, for each vector of finite `x [..., D]` within +-65504.

    Half a step, where the step is `(max - zero) / 255` rounded up to float16 and `zero` lies at most one float16 step
    below the minimum; plus float32 rounding of `(x - zero) / scale` and of `q * scale + zero`.
    """
    low, high = x.amin(-1), x.amax(-1)
    span = (high - low) + low.abs() * _HALF_EPS + _HALF_TINY
    step = span / LEVELS * (1 + _HALF_EPS) + _HALF_TINY
    return step * (0.5 + LEVELS * 2.0**-22) + (low.abs() + high.abs()) * 2.0**-22
