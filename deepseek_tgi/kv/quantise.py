"""How far a cached key or value may be off after a write and a read, for each number format.

The arithmetic itself lives in `kernels`, below this package, because the kernels write it.
"""

from __future__ import annotations

import math

import torch

from deepseek_tgi.kernels.fp8_format import E4M3_MAX, dequantise_fp8, quantise_fp8
from deepseek_tgi.kernels.int4_format import SHIFT_PART, dequantise_int4, quantise_int4, rotate, rotation_size
from deepseek_tgi.kernels.int8_format import HALF_MAX, LEVELS, dequantise_rows, quantise_rows
from deepseek_tgi.kernels.latent_format import LEVELS as INT4_LEVELS
from deepseek_tgi.kernels.precision import int4_group

__all__ = [
    "HALF_MAX", "dequantise_fp8", "dequantise_int4", "dequantise_rows", "error_bound", "quantise_fp8", "quantise_int4",
    "quantise_rows",
]  # fmt: skip

_HALF_EPS = 2.0**-10
_HALF_TINY = 2.0**-24
_FLOAT_EPS = 2.0**-22
_WIDEST_GAP = 14.5
"""Half of the widest gap between INT4 levels."""
_LEAST_SCALE = 8 / 11
"""The smallest scale that is tried, as a part of the one that clips nothing: three mantissas below eleven eighths."""


def error_bound(x: torch.Tensor, mode: str, shaped: bool = False) -> torch.Tensor:
    """Largest error of one element after a write and a read, for each vector of finite `x [..., D]` within +-65504.

    At INT4 it is a bound on the errors of the whole vector together, the root of their squared sum, for vectors of a
    length up to 86000 (elements of longer ones may saturate once they are rotated, at 121920). Of keys in a frame,
    `x` is what is left when the centre is off, and `shaped` is true at INT4 if the frame has an aim.
    """
    bounds = {"float32": _exact, "bfloat16": _bfloat16, "float16": _float16, "int8": _int8, "fp8_e4m3fn": _fp8}
    return _int4(x, shaped) if mode == "int4" else bounds[mode](x)


def _exact(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x[..., 0])


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1) * 2.0**-8


def _float16(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1) * 2.0**-11 + _HALF_TINY


def _int8(x: torch.Tensor) -> torch.Tensor:
    """Half a step, where the step is `(max - zero) / 255` rounded up to float16 and `zero` lies at most one float16
    step below the minimum; plus float32 rounding of `(x - zero) / scale` and of `q * scale + zero`.
    """
    low, high = x.amin(-1), x.amax(-1)
    span = (high - low) + low.abs() * _HALF_EPS + _HALF_TINY
    step = span / LEVELS * (1 + _HALF_EPS) + _HALF_TINY
    return step * (0.5 + LEVELS * _FLOAT_EPS) + (low.abs() + high.abs()) * _FLOAT_EPS


def _fp8(x: torch.Tensor) -> torch.Tensor:
    """Half a step of 4 significant bits at the largest element, or of E4M3's smallest step; for its own scale."""
    largest = x.abs().amax(-1)
    scale = largest / E4M3_MAX * (1 + _HALF_EPS) + _HALF_TINY
    return torch.maximum(largest * 2.0**-4, scale * 2.0**-10) * (1 + _FLOAT_EPS) + _HALF_TINY


def _int4(x: torch.Tensor, shaped: bool) -> torch.Tensor:
    """Of the rotated groups: the widest half gap for every element at the least scale that clips nothing, a mantissa
    step or two above `max / 127`; the searched scale has no larger sum of squares. A shaped group may aim off and take
    any of the scales. Rotating back keeps the length.
    """
    size = int4_group(x.shape[-1])
    top = rotate(x.float()).view(*x.shape[:-1], -1, size).abs().amax(-1)
    scale = top / INT4_LEVELS[-1] * (1 + 2 * 2.0**-3) + 2.0**-22
    worst = scale * _WIDEST_GAP
    if shaped:
        aimed = top * (1 + SHIFT_PART)
        worst = torch.maximum(worst * (1 + SHIFT_PART), aimed * (1 - _LEAST_SCALE)) + top * SHIFT_PART
    run = rotation_size(x.shape[-1])
    back = math.sqrt(run) * 2.0 ** -(run.bit_length() // 2)  # rotation and its inverse are not of length 1 each
    return (worst.square().sum(-1) * size).sqrt() * back * (1 + 2.0**-16) + x.abs().amax(-1) * 2.0**-20
