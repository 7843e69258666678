"""The number formats of a cached latent (MLA), in plain torch: what each stores, and the error it may make.

A latent is cut into groups that share a scale. INT8: codes -127..127, `x = code * scale`, float16 scales. FP8: E4M3
with the group's largest magnitude at 448. These scales are rounded up to float16, so nothing is clipped.

INT4: a group is first rotated, `y = H D x / g`, so `x = D H y`: H is the Hadamard matrix of g rows, the diagonal D
turns the signs of elements 3, 7, 11, 12, 13, 14 of every sixteen (a bent function: equal elements do not all meet in
one row of H). `y = level * scale`, the level being one of 16 (`LEVELS` and their negatives, ascending by code), the
scale a float16 without sign and with three bits of mantissa, divided by 64: its byte is bits 7 to 14 of the float16.
Four neighbouring scales are tried, from the least that clips nothing downwards; the one of the smallest squared error
is kept, the larger if two are equal. Element i of a group is the low nibble of its byte i, element g/2 + i the high
one. Bytes are the same on every implementation, so each operation below has one order.

Choice: symmetric, since a latent leaves an RMS norm and lies around 0. Its channels differ in size by the norm's
learned weight, which costs plain 4-bit codes 2 to 8 dB and the rotated ones nothing; attention may turn queries
instead, as `q (D H y) = (H D q) y`, so reading is no dearer. Levels are those of least error for a normal distribution
under this very search. Groups of 64 with plain codes and float16 scales take the same bytes and have 19.4 dB on normal
data; this has 22.0 dB on all we tried. Rejected: a zero for each group, which costs as much as halving the group.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX, half_towards

LARGEST = {"int8": 127.0, "fp8_e4m3fn": 448.0}
"""Largest code of the modes whose codes are numbers."""
LEVELS = (6.0, 18.0, 31.0, 45.0, 60.0, 77.0, 98.0, 127.0)
"""Magnitudes of the INT4 levels: code 8 + i is `LEVELS[i]`, code 7 - i its negative."""
TURNED = (3, 7, 11, 12, 13, 14)
"""Elements of every sixteen whose signs turn before the rotation."""
SCALE_TRIALS = 4
MIDDLES = tuple((a + b) / 2 for a, b in pairwise(LEVELS))
_SCALE_UNIT = 64.0
_NAN_BYTE = 0xFC
_MANTISSA_STEP, _WIDEST_GAP = 2.0**-3, 14.5


def quantise_latent(x: torch.Tensor, mode: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x [..., R] float32`: codes `[..., R] uint8` (`[..., R/2]` for INT4), scales `[..., R/group]` (float16,
    uint8 for INT4).

    Values beyond float16 saturate at +-65504; a group holding NaN gets a NaN scale, so that it reads back as NaN.
    """
    parts = x.float().clamp(-HALF_MAX, HALF_MAX).reshape(*x.shape[:-1], -1, group)
    if mode == "int4":
        return _quantise_rotated(hadamard(parts * signs(group, x.device)) / group)
    scale = half_towards(parts.abs().amax(-1) / LARGEST[mode], up=True)
    step = torch.where(scale > 0, scale, 1.0).float().unsqueeze(-1)
    steps = torch.where(scale.isnan().unsqueeze(-1), 0.0, parts / step).flatten(-2)
    if mode == "fp8_e4m3fn":
        return steps.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale
    return steps.round().clamp(-127, 127).to(torch.int8).view(torch.uint8), scale


def dequantise_latent(codes: torch.Tensor, scale: torch.Tensor, mode: str) -> torch.Tensor:
    """Inverse of `quantise_latent`: `[..., R] float32`."""
    if mode == "int4":
        return unrotate(dequantise_rotated(codes, scale).view(*scale.shape, -1)).flatten(-2)
    values = codes.view(torch.float8_e4m3fn if mode == "fp8_e4m3fn" else torch.int8).float()
    return (values.view(*scale.shape, -1) * scale.float().unsqueeze(-1)).flatten(-2)


def dequantise_rotated(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """INT4 as stored, in the rotated space of its groups: `[..., R] float32`."""
    parts = codes.view(*scale.shape, -1)
    levels = level_values(codes.device)[torch.cat((parts & 15, parts >> 4), -1).long()]
    return (levels * scale_of(scale).unsqueeze(-1)).flatten(-2)


def error_bound(x: torch.Tensor, mode: str, group: int) -> torch.Tensor:
    """Largest error a write and a read make for finite `x [..., R]` within +-65504, as `[..., R / group]`.

    For INT4 the bound is on the group's errors together (root of their squared sum): the widest half gap between levels
    for every element, at a scale one mantissa step above the least. In the other modes it is on a single element: half
    a step of the format, the step rounded up to float16.
    """
    parts = x.float().reshape(*x.shape[:-1], -1, group)
    largest = parts.abs().amax(-1)
    tiny = 2.0**-24
    if mode == "float32":
        return torch.zeros_like(largest)
    if mode in {"bfloat16", "float16"}:
        return largest * 2.0 ** (-8 if mode == "bfloat16" else -11) + tiny
    if mode == "int4":
        top = hadamard(parts * signs(group, x.device)).abs().amax(-1) / group
        scale = top / LEVELS[-1] * (1 + _MANTISSA_STEP) + 2.0**-17 / _SCALE_UNIT
        return scale * _WIDEST_GAP * group * (1 + 2.0**-16)
    step = largest / LARGEST[mode] * (1 + 2.0**-10) + tiny
    if mode == "fp8_e4m3fn":
        return torch.maximum(largest * 2.0**-4, step * 2.0**-10) * (1 + 2.0**-20)
    return step * (0.5 + 127 * 2.0**-23)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """`H x` along the last axis (a power of two), without a factor: sums and differences of halves, then of quarters,
    and so on.
    """
    half = x.shape[-1] // 2
    while half:
        a, b = x.view(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half //= 2
    return x


def signs(group: int, device: torch.device) -> torch.Tensor:
    """Diagonal of D, `[group]`."""
    return constant(tuple(-1.0 if i % 16 in TURNED else 1.0 for i in range(group)), device)


@cache
def constant(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The same tensor for every caller, to be read: a CUDA graph cannot record that numbers come from the host."""
    with torch.inference_mode(mode=False):
        return torch.tensor(numbers, device=device)


def unrotate(y: torch.Tensor) -> torch.Tensor:
    """`D H y` along the last axis: INT4's rotation undone."""
    return hadamard(y) * signs(y.shape[-1], y.device)


def scale_of(byte: torch.Tensor) -> torch.Tensor:
    """INT4's scale as float32."""
    return (byte.to(torch.int16) << 7).view(torch.float16).float() / _SCALE_UNIT


def _quantise_rotated(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = y.abs().amax(-1)
    bits = half_towards(torch.nan_to_num(top) / LEVELS[-1] * _SCALE_UNIT, up=True).view(torch.int16)
    first = bits.int() + 127 >> 7
    kept, smallest, codes = first, torch.full_like(top, float("inf")), torch.empty_like(y, dtype=torch.uint8)
    for trial in range(SCALE_TRIALS):
        byte = (first - trial).clamp(min=0)
        found, error = _nearest(y, scale_of(byte).unsqueeze(-1))
        better = error < smallest if trial else torch.ones_like(error, dtype=torch.bool)
        kept, smallest = torch.where(better, byte, kept), torch.where(better, error, smallest)
        codes = torch.where(better.unsqueeze(-1), found, codes)
    low, high = codes.chunk(2, -1)
    return (low | high << 4).flatten(-2), torch.where(top.isnan(), _NAN_BYTE, kept).to(torch.uint8)


def _nearest(y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `y [..., g]` at `scale [..., 1]` and the group's squared error, summed half onto half."""
    steps = y / torch.where(scale > 0, scale, 1.0)
    index = torch.bucketize(steps.abs(), constant(MIDDLES, y.device))  # the smaller level where two are equally near
    index = torch.where(steps.isnan(), 0, index)
    codes = torch.where(steps > 0, 8 + index, 7 - index)
    error = (y - level_values(y.device)[codes] * scale).square()
    while error.shape[-1] > 1:
        low, high = error.chunk(2, -1)
        error = low + high
    return codes.to(torch.uint8), error.squeeze(-1)


def level_values(device: torch.device) -> torch.Tensor:
    """What codes stand for, `[16]`."""
    return constant((*(-level for level in reversed(LEVELS)), *LEVELS), device)
