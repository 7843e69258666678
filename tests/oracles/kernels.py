"""The kernels' arithmetic restated in numpy float64, from the papers and formats, with no torch and no code of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def int4_weight(codes: Array, zeros: Array, scales: Array, group_size: int) -> Array:
    """`(code - zero) * scale`, zero and scale shared by `group_size` neighbours along K."""
    group = np.arange(codes.shape[1]) // group_size
    wide = [a.astype(np.float64) for a in (codes, zeros[:, group], scales[:, group])]
    weight: Array = (wide[0] - wide[1]) * wide[2]
    return weight


def linear(x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None) -> Array:
    """`x W^T + bias + residual`."""
    y: Array = x.astype(np.float64) @ weight.astype(np.float64).T
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Zhang and Sennrich 2019, equation 4, with epsilon under the root."""
    wide = x.astype(np.float64)
    normed: Array = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)
    return normed


def silu_mul(gate_up: Array) -> Array:
    """`gate * sigmoid(gate) * up`."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    gated: Array = gate / (1 + np.exp(-gate)) * up
    return gated


def rotate(x: Array, angles: Array) -> Array:
    """Rotation of the complex numbers `x[i] + j x[i + half]` by `angles [T, half]`, for `x [T, heads, D]`."""
    half = angles.shape[1]
    wide = x.astype(np.float64)
    turned = (wide[..., :half] + 1j * wide[..., half : 2 * half]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate((turned.real, turned.imag, wide[..., 2 * half :]), -1)


def attention(q: Array, keys: Array, values: Array, first_position: int, scale: float) -> Array:
    """One request: `q [n, H, D]` at positions `first_position ..`, `keys`/`values [L, G, D]` of positions 0 .. L-1."""
    n, heads, _ = q.shape
    ratio = heads // keys.shape[1]
    out = np.empty((n, heads, values.shape[2]))
    for i in range(n):
        seen = first_position + i + 1
        for head in range(heads):
            scores = keys[:seen, head // ratio].astype(np.float64) @ q[i, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ values[:seen, head // ratio].astype(np.float64) / weights.sum()
    return out


def int8_vector(x: Array) -> tuple[Array, float, float]:
    """`(q, scale, zero)` of one vector: zero the float16 at or below the minimum, scale that at or above the step.

    Steps in float32, as the format says: `q = round_half_even((x - zero) / scale)`.
    """
    x = np.clip(x.astype(np.float32), -65504, 65504)
    zero = _half(x.min(), np.floor)
    scale = _half((x.max() - np.float32(zero)) / np.float32(255), np.ceil)
    if scale == 0:
        return np.zeros(x.shape, np.uint8), 0.0, zero
    q = np.rint((x - np.float32(zero)) / np.float32(scale))
    return np.clip(q, 0, 255).astype(np.uint8), scale, zero


def _half(x: np.float32, towards: Any) -> float:
    """float16 neighbour of `x` on the side `towards` (floor or ceil) says, by its own spacing: no nextafter."""
    exponent = max(np.frexp(np.float64(x))[1] - 11, -24)
    return float(towards(np.float64(x) / 2.0**exponent) * 2.0**exponent)


def expert(x: Array, gate_up: Array, down: Array) -> Array:
    """One expert for rows `x [n, H]`, from its weights as they are meant."""
    return linear(silu_mul(linear(x, gate_up)), down)


def experts(
    x: Array, ids: Array, weights: Array, matrices: list[tuple[Array, Array]], shared: tuple[Array, Array] | None
) -> Array:
    """What a layer's experts add for each token: DeepSeek-V2, equation 20, without the residual."""
    total = np.zeros(x.shape) if shared is None else expert(x, *shared)
    for t, chosen in enumerate(ids):
        for j, e in enumerate(chosen):
            total[t] += float(weights[t, j]) * expert(x[t : t + 1], *matrices[int(e)])[0]
    return total
