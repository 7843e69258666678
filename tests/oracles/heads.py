"""INT4 keys and values of one head, restated in numpy one number at a time, with no torch and no code of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles.latents import LEVELS, half_up

Array = NDArray[Any]
F = np.float32


@dataclass(frozen=True, slots=True)
class Aim:
    """Direction of length 1 (rotated by position, if at all) and its weight."""

    u: Array
    weight: float


def group_size(width: int) -> int:
    """Elements that share a scale byte."""
    return {32: 4, 64: 4, 96: 8, 128: 8, 160: 16, 256: 16}[width]


def run_length(width: int) -> int:
    """The largest power of two that divides `width`."""
    size = 1
    while width % (2 * size) == 0:
        size *= 2
    return size


def matrix(width: int) -> Array:
    """Hadamard's matrix (Sylvester's) along the diagonal, `[width, width]`, entries 0 and +-1."""
    size = run_length(width)
    one = np.ones((1, 1))
    while len(one) < size:
        one = np.block([[one, one], [one, -one]])
    return np.kron(np.eye(width // size), one)


def rotated(x: Array) -> Array:
    """`H x / 2^floor(m/2)` in float32: butterflies from the widest to the narrowest."""
    y, size = x.astype(F), run_length(len(x))
    half = size // 2
    while half:
        for start in range(0, len(y), 2 * half):
            for i in range(start, start + half):
                y[i], y[i + half] = y[i] + y[i + half], y[i] - y[i + half]
        half //= 2
    return y / F(2 ** (int(np.log2(size)) // 2))


def unrotated(y: Array) -> Array:
    """The inverse, by the matrix, float64."""
    m = int(np.log2(run_length(len(y))))
    back: Array = matrix(len(y)) @ y.astype(np.float64) / 2 ** ((m + 1) // 2)
    return back


def total(x: Array) -> Any:
    """Half onto half while the length is even, then in order; float32."""
    while len(x) % 2 == 0:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    result = x[0]
    for value in x[1:]:
        result = result + value
    return result


def scale_of(byte: int) -> Any:
    """A float16 without sign and with three bits of mantissa, over 64."""
    return F(np.array([byte << 7], np.uint16).view(np.float16)[0]) / F(64)


def int4(y: Array, mark: int | None = None, aim: Aim | None = None) -> tuple[list[int], list[int]]:
    """Bytes of codes and of scales for a rotated vector; `aim.u` is rotated as well."""
    size = group_size(len(y))
    count = len(y) // size
    ahead = [F(0)] * (count + 1)
    if aim is not None:
        for index in reversed(range(count)):
            ahead[index] = ahead[index + 1] + total(aim.u[index * size : (index + 1) * size] ** 2)
    along, codes, scales = F(0), [], []
    for index in range(count):
        group = y[index * size : (index + 1) * size]
        u, target, later = None, group, F(0)
        if aim is not None:
            u, weight = aim.u[index * size : (index + 1) * size], F(aim.weight)
            limit = np.abs(group).max() * F(0.125)
            target = group - np.clip(u * (weight * along / (F(1) + weight * ahead[index])), -limit, limit)
            later = weight / (F(1) + weight * ahead[index + 1])
        found = _search(group, target, mark if index == 0 else None, u, later, along)
        codes += found[0]
        scales.append(found[1])
        along = found[2]
    half = len(y) // 2
    return [a | b << 4 for a, b in zip(codes[:half], codes[half:], strict=True)], scales


def int4_values(codes: list[int], scales: list[int]) -> Array:
    """What the bytes stand for, still rotated."""
    order = [c & 15 for c in codes] + [c >> 4 for c in codes]
    size = group_size(len(order))
    return np.array([LEVELS[c] * float(scale_of(scales[i // size])) for i, c in enumerate(order)])


def _search(
    group: Array, target: Array, mark: int | None, u: Array | None, later: Any, along: Any
) -> tuple[list[int], int, Any]:
    top = F(np.abs(target).max()) / F(127) * F(64)
    bits = int(np.array([half_up(min(top, F(65504)))]).view(np.uint16)[0])
    first, step = min((bits + 127) >> 7, 0xF7), 1
    if mark is not None:
        first, step = first + ((first ^ mark) & 1), 2
        first = first - 2 if first > 0xF7 else first
    best: tuple[Any, list[int], int, Any] | None = None
    for trial in range(0, 4, step):
        byte = first - trial if first >= trial else first
        scale = scale_of(byte)
        codes = [_nearest(v) for v in target / (scale if scale > 0 else F(1))]
        error = np.array([F(LEVELS[c]) * scale for c in codes], F) - group
        cost, moved = total(error * error), F(0)
        if u is not None:
            moved = along + total(u * error)
            cost = cost + later * (moved * moved)
        if best is None or cost < best[0]:
            best = cost, codes, byte, moved
    assert best is not None
    return best[1:]


def _nearest(v: Any) -> int:
    """Code of the level nearest to v; the one nearer to zero if two are as near, the negative one at zero."""
    distance = [abs(abs(float(v)) - level) for level in LEVELS[8:]]
    index = distance.index(min(distance))
    return 8 + index if v > 0 else 7 - index
