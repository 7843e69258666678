"""The formats of a cached latent and attention over latents, restated in numpy with no torch and no code of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LEVELS = [-127, -98, -77, -60, -45, -31, -18, -6, 6, 18, 31, 45, 60, 77, 98, 127]
TURNED = {3, 7, 11, 12, 13, 14}
F = np.float32


def half_up(x: Any) -> Any:
    """The least float16 at or above `x >= 0`."""
    nearest = np.float16(x)
    return nearest if F(nearest) >= x else np.nextafter(nearest, np.float16(np.inf))


def int8(x: Array) -> tuple[list[int], float]:
    """Codes (as bytes) and scale of one group."""
    scale = half_up(np.abs(x).max() / F(127))
    codes = np.rint(x / F(scale if scale > 0 else 1)).clip(-127, 127).astype(np.int8)
    return codes.view(np.uint8).tolist(), float(scale)


def fp8(x: Array) -> tuple[list[int], float]:
    """Codes and scale of one group; each code is found among all 127 magnitudes of E4M3."""
    scale = half_up(np.abs(x).max() / F(448))
    codes = []
    for v in x / F(scale if scale > 0 else 1):
        distance = [abs(abs(float(v)) - e4m3(code)) for code in range(127)]
        near = [code for code in range(127) if distance[code] == min(distance)]
        codes.append(min(near, key=lambda code: code % 2) | (128 if np.signbit(v) else 0))
    return codes, float(scale)


def e4m3(code: int) -> float:
    """Magnitude of an E4M3 code below 127 (OCP 8-bit floating point, table 1)."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def rotated(x: Array) -> Array:
    """`H D x / g` in float32: butterflies from the widest to the narrowest."""
    y = np.array([-v if i % 16 in TURNED else v for i, v in enumerate(x)], dtype=F)
    half = len(y) // 2
    while half:
        for start in range(0, len(y), 2 * half):
            for i in range(start, start + half):
                y[i], y[i + half] = y[i] + y[i + half], y[i] - y[i + half]
        half //= 2
    return y / F(len(x))


def back(y: Array) -> Array:
    """`D H y` by the matrix itself, float64."""
    n = len(y)
    signs = np.array([-1 if i % 16 in TURNED else 1 for i in range(n)])
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
    result: Array = signs * (matrix @ y.astype(np.float64))
    return result


def int4(x: Array) -> tuple[list[int], int]:
    """Packed codes and the byte of the scale of one group."""
    y = rotated(x)
    first = int(half_up(np.abs(y).max() / F(127) * F(64)).view(np.uint16))
    first = -(-first // 128)
    best: tuple[float, list[int], int] | None = None
    for trial in range(4):
        byte = max(first - trial, 0)
        scale = int4_scale(byte)
        steps = y / F(scale if scale > 0 else 1)
        codes = [_code(float(v)) for v in steps]
        errors = (y - np.array([LEVELS[c] for c in codes], dtype=F) * scale) ** 2
        while len(errors) > 1:
            errors = errors[: len(errors) // 2] + errors[len(errors) // 2 :]
        if best is None or errors[0] < best[0]:
            best = errors[0], codes, byte
    assert best is not None
    half = len(y) // 2
    return [best[1][i] | best[1][half + i] << 4 for i in range(half)], best[2]


def int4_scale(byte: int) -> Any:
    """float16 of bits 7 to 14, over 64."""
    return F(np.uint16(byte << 7).view(np.float16)) / F(64)


def _code(v: float) -> int:
    magnitude = min(range(8), key=lambda i: (abs(LEVELS[8 + i] - abs(v)), i))
    return 8 + magnitude if v > 0 else 7 - magnitude


def attention(q: Array, latent: Array, rope: Array, up: Array, cached: int, scale: float) -> Array:
    """DeepSeek-V2, equations 9 to 19, expanded: `q [n, H, Dr + Dn]`, `latent [L, R]`, `rope [L, Dr]`.

    `up` is `[H, Dn + Dv, R]`. A head's key at a position: its rotary key, then the first rows of `up` times the latent.
    """
    n, heads, width = q.shape
    nope = width - rope.shape[1]
    made = latent.astype(np.float64) @ up.astype(np.float64).transpose(0, 2, 1)  # [H, L, Dn + Dv]
    out = np.empty((n, heads, made.shape[2] - nope))
    keys = np.concatenate((np.broadcast_to(rope, (heads, *rope.shape)), made[..., :nope]), 2)  # [H, L, Dr + Dn]
    for i in range(n):
        seen = cached + i + 1
        scores = np.einsum("hld,hd->hl", keys[:, :seen], q[i].astype(np.float64)) * scale
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[i] = np.einsum("hl,hld->hd", weights / weights.sum(1, keepdims=True), made[:, :seen, nope:])
    return out
