"""The INT4 number format of cached keys and values of one head, in plain torch.

A vector of D elements (a multiple of 32) is rotated, `y = H x / 2^floor(m/2)` with H the Hadamard matrix of 2^m rows,
the largest power of two that divides D, laid along the vector as often as it fits. It is then cut into groups of 4 up
to D = 64, of 8 up to 128, else of 16. An element is `level * scale`: one of the 16 levels of `latent_format`, and a
scale byte for each group, as there. Element i is the low nibble of byte i, element D/2 + i the high one. A vector takes
D/2 + 16 bytes where D is 64, 128 or 256, less between. Scales are searched from the least that clips nothing downwards
(`TRIALS`); the smallest squared error wins, the larger scale if two are equal. Keys differ in the first group: the
lowest bit of its scale byte is a mark (`Frame`: the centre was taken off), so every second scale is tried there. Bytes
are the same on every implementation, so each operation below has one order.

Keys may be shaped (`Aim`): queries look along few directions, and an error across them does no harm. Groups are
quantised one after the other; each aims off by what cancels the error so far along the direction `u`, at most an eighth
of its largest element, and takes the scale with the least `|e|^2 + w (u e)^2` (Bellman's equation for `|e|^2 +
weight (u e)^2`, later errors taken as continuous).

Choice, measured on SmolLM2-135M, the divergence of predictions in 1e-3 nats a token with keys or values alone in
4 bits: scale and zero for a key of 64, as usual: 124; rotated 53; the centre taken off as well 12; groups of 8 with
searched scales 5; shaped 3.3. Values: 8.7, rotated 5.8, groups of 8 3.0. Groups of 4 are another third better: with
those of 8, keys and values together still cost 1.1 % of perplexity; with these, 0.6 %.
Prevents: 4-bit keys that are most of all a constant, which costs 9 % of perplexity here and everything with Qwen2's
biases. Rejected: a zero for each group (more to search and to read for what smaller groups give), channels scaled by
their weight (nothing on top of shaping), whitening from calibration data (no gain on other text), 5-bit keys (no longer
what the name says).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX, half_towards
from deepseek_tgi.kernels.latent_format import LEVELS, MIDDLES, constant, hadamard, level_values, scale_of
from deepseek_tgi.kernels.precision import int4_group

TRIALS = 4
NAN_BYTE = 0xFC
LARGEST_BYTE = 0xF7
SHIFT_PART = 0.125
"""How far a shaped group may aim off, as a part of its largest element."""
_TOP = LEVELS[-1]
_SCALE_UNIT = 64.0


@dataclass(frozen=True, slots=True)
class Aim:
    """What the errors of rotated keys should not lie along: `u [..., D]`, rotated, and how much it counts, `weight`,
    of a shape that fits `[..., 1]`.
    """

    u: torch.Tensor
    weight: torch.Tensor


def rotation_size(width: int) -> int:
    """Rows of the Hadamard matrix: the largest power of two that divides `width`."""
    return width & -width


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The rotation that precedes quantising, along the last axis."""
    return _turned(x, (rotation_size(x.shape[-1]).bit_length() - 1) // 2)


def unrotate(y: torch.Tensor) -> torch.Tensor:
    """Inverse of `rotate`; the rotation of queries as well, since `q (H' y) = (H' q) y`."""
    return _turned(y, rotation_size(y.shape[-1]).bit_length() // 2)


def fold(x: torch.Tensor) -> torch.Tensor:
    """The sum along the last axis, kept: half added onto half while the length is even, then in order."""
    while x.shape[-1] % 2 == 0:
        low, high = x.chunk(2, -1)
        x = low + high
    total = x[..., :1]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i : i + 1]
    return total


def quantise_rotated(
    y: torch.Tensor, mark: torch.Tensor | None = None, aim: Aim | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rotated vectors `y [..., D] float32`: codes `[..., D/2] uint8`, scale bytes `[..., D/group] uint8`.

    `mark [..., 1] bool` is given for keys. A vector holding NaN reads back as NaN.
    """
    size = int4_group(y.shape[-1])
    lost = y.isnan().any(-1, keepdim=True)
    y = torch.where(lost, 0.0, y)
    error_along = torch.zeros_like(y[..., :1])
    ahead = _lengths_ahead(aim.u, size) if aim is not None else []
    codes, scales = [], []
    for index in range(y.shape[-1] // size):
        group = y[..., index * size : (index + 1) * size]
        forced = mark if index == 0 else None
        if aim is None:
            code, byte, _ = _best(group, group, forced, None)
        else:
            u = aim.u[..., index * size : (index + 1) * size]
            limit = group.abs().amax(-1, keepdim=True) * SHIFT_PART
            shift = u * (aim.weight * error_along / (1 + aim.weight * ahead[index]))
            later = _Later(u, aim.weight / (1 + aim.weight * ahead[index + 1]), error_along)
            code, byte, error_along = _best(group, group - shift.clamp(-limit, limit), forced, later)
        codes.append(code)
        scales.append(byte)
    low, high = torch.cat(codes, -1).chunk(2, -1)
    packed = torch.where(lost, 0x77, low | high << 4)
    return packed.to(torch.uint8), torch.where(lost, NAN_BYTE, torch.cat(scales, -1)).to(torch.uint8)


def dequantise_rotated(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Vectors as stored, still rotated: `[..., D] float32`."""
    levels = level_values(codes.device)[torch.cat((codes & 15, codes >> 4), -1).long()]
    return (levels.view(*scales.shape, -1) * scale_of(scales).unsqueeze(-1)).flatten(-2)


def quantise_int4(x: torch.Tensor, mark: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise_rotated` of `x [..., D]`; values beyond float16 saturate at +-65504."""
    return quantise_rotated(rotate(x.float().clamp(-HALF_MAX, HALF_MAX)), mark)


def dequantise_int4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantise_int4`."""
    return unrotate(dequantise_rotated(codes, scales))


def mark_of(scales: torch.Tensor) -> torch.Tensor:
    """The mark of keys with scale bytes `[..., n]`: `[...] bool`."""
    return (scales[..., 0] & 1).bool()


@dataclass(frozen=True, slots=True)
class _Later:
    """What an error along `u` costs groups to come: `weight`, and the error along it so far."""

    u: torch.Tensor
    weight: torch.Tensor
    error_along: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Choice:
    """Codes of a group `[..., g]`, and of each its scale byte, the error along `u` and the cost, `[..., 1]`."""

    codes: torch.Tensor
    byte: torch.Tensor
    along: torch.Tensor
    cost: torch.Tensor

    def unless_better(self, other: _Choice) -> _Choice:
        """This choice, but `other` where that costs less."""
        better = other.cost < self.cost
        pairs = ((self.codes, other.codes), (self.byte, other.byte), (self.along, other.along), (self.cost, other.cost))
        return _Choice(*(torch.where(better, theirs, own) for own, theirs in pairs))


def _turned(x: torch.Tensor, exponent: int) -> torch.Tensor:
    parts = x.reshape(*x.shape[:-1], -1, rotation_size(x.shape[-1]))
    return (hadamard(parts.contiguous()) * 2.0**-exponent).flatten(-2)


def _lengths_ahead(u: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Squared length of `u` from each group on, and 0 behind the last."""
    lengths = [torch.zeros_like(u[..., :1])]
    for index in reversed(range(u.shape[-1] // size)):
        lengths.insert(0, lengths[0] + fold(u[..., index * size : (index + 1) * size].square()))
    return lengths


def _best(
    y: torch.Tensor, target: torch.Tensor, mark: torch.Tensor | None, later: _Later | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes nearest to `target [..., g]` at the scale that serves `y` best, its byte, and the error along `u`."""
    top = target.abs().amax(-1, keepdim=True) / _TOP * _SCALE_UNIT
    first = (half_towards(top.clamp(max=HALF_MAX), up=True).view(torch.int16).int() + 127 >> 7).clamp(max=LARGEST_BYTE)
    step = 1
    if mark is not None:
        first, step = first + ((first ^ mark.int()) & 1), 2
        first = torch.where(first > LARGEST_BYTE, first - 2, first)
    best: _Choice | None = None
    for trial in range(TRIALS // step):
        byte = torch.where(first >= trial * step, first - trial * step, first)
        found, error = _nearest(y, target, scale_of(byte))
        cost, moved = fold(error.square()), torch.zeros_like(top)
        if later is not None:
            moved = later.error_along + fold(later.u * error)
            cost = cost + later.weight * (moved * moved)
        choice = _Choice(found, byte, moved, cost)
        best = choice if best is None else best.unless_better(choice)
    assert best is not None
    return best.codes, best.byte, best.along


def _nearest(y: torch.Tensor, target: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `target [..., g]` at `scale [..., 1]`, and what they are off from `y`."""
    steps = target / torch.where(scale > 0, scale, 1.0)
    index = torch.bucketize(steps.abs(), constant(MIDDLES, y.device))  # the smaller where two are as near
    codes = torch.where(steps > 0, 8 + index, 7 - index)
    return codes, level_values(y.device)[codes] * scale - y
