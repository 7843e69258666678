"""Public 4-bit checkpoint layouts restated in numpy, from their published description; no product code.

Everything starts from `codes [N, K]`, `zeros [N, G]` (0..15) and `scales [N, G]`, with
`weight = (codes - zeros) * scales`. Writers produce tensors as the named tool saves them; `read_gemm` undoes AutoAWQ's
gemm layout word by word. Loops are welcome here: this is the slow truth.

Sources: AutoAWQ 0.2.9 `modules/linear/{gemm,gemv}.py` and `utils/packing_utils.py`; compressed-tensors
`compressors/quantized_compressors/pack_quantized.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Array = NDArray[np.generic]


@dataclass(frozen=True)
class Layer:
    """One quantised linear layer in plain numbers. `group_size` is the real one."""

    codes: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[np.float16]
    group_size: int

    def weight(self) -> NDArray[np.float32]:
        """`[N, K] float32`."""
        zeros = np.repeat(self.zeros, self.group_size, axis=1)
        scales = np.repeat(self.scales.astype(np.float32), self.group_size, axis=1)
        return ((self.codes - zeros).astype(np.float32) * scales).astype(np.float32)


def random_layer(n: int, k: int, group_size: int, seed: int = 0, symmetric: bool = False) -> Layer:
    """A layer with every code value, distinct zeros and scales of either small or large size."""
    rng = np.random.default_rng(seed)
    groups = k // group_size
    zeros = np.full((n, groups), 8) if symmetric else rng.integers(0, 16, (n, groups))
    scales = (rng.random((n, groups)) * 0.02 + 0.005).astype(np.float16)
    return Layer(rng.integers(0, 16, (n, k)), zeros, scales, group_size)


def gemm_tensors(layer: Layer) -> dict[str, Array]:
    """AutoAWQ gemm: `qweight [K, N/8]`, `qzeros [G, N/8]`, `scales [G, N]`, columns in the interleaved order."""
    return {
        "qweight": _pack_last_axis(layer.codes.T, GEMM_ORDER),
        "qzeros": _pack_last_axis(layer.zeros.T, GEMM_ORDER),
        "scales": np.ascontiguousarray(layer.scales.T),
    }


def gemv_tensors(layer: Layer) -> dict[str, Array]:
    """AutoAWQ gemv: `qweight [N, K/8]`, `qzeros [N, W]`, `scales [N, 8 W]`, natural order, padded groups."""
    n, groups = layer.zeros.shape
    multiplier = {32: 4, 64: 2}.get(layer.group_size, 1)
    words = (groups + 7) // 8
    width = (words + multiplier - 1) // multiplier * multiplier
    zeros = np.zeros((n, width * 8), dtype=np.int64)
    zeros[:, :groups] = layer.zeros
    scales = np.zeros((n, width * 8), dtype=layer.scales.dtype)
    scales[:, :groups] = layer.scales
    return {
        "qweight": _pack_last_axis(layer.codes, tuple(range(8))),
        "qzeros": _pack_last_axis(zeros, tuple(range(8))),
        "scales": scales,
    }


def pack_quantized_tensors(layer: Layer, symmetric: bool) -> dict[str, Array]:
    """compressed-tensors `pack-quantized`: rows packed along the input side, zeros along the output side."""
    n, k = layer.codes.shape
    tensors: dict[str, Array] = {
        "weight_packed": _pack_last_axis(_pad_last(layer.codes), tuple(range(8))),
        "weight_scale": layer.scales.copy(),
        "weight_shape": np.array([n, k], dtype=np.int64),
    }
    if not symmetric:
        packed = _pack_last_axis(_pad_last(layer.zeros.T), tuple(range(8)))
        tensors["weight_zero_point"] = np.ascontiguousarray(packed.T)
    return tensors


def read_gemm(qweight: Array, qzeros: Array, scales: Array, group_size: int) -> NDArray[np.float32]:
    """The dense `[N, K]` weight of gemm tensors, one word at a time."""
    codes, zeros = _unpack_last_axis(qweight, GEMM_ORDER), _unpack_last_axis(qzeros, GEMM_ORDER)
    wide_zeros = np.repeat(zeros, group_size, axis=0)
    wide_scales = np.repeat(scales.astype(np.float32), group_size, axis=0)
    return np.ascontiguousarray(((codes - wide_zeros).astype(np.float32) * wide_scales).T)


def _pad_last(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.pad(values, ((0, 0), (0, -values.shape[1] % 8)))


def _pack_last_axis(values: NDArray[np.int64], order: tuple[int, ...]) -> NDArray[np.int32]:
    rows, columns = values.shape
    words = np.zeros((rows, columns // 8), dtype=np.uint32)
    for nibble, column in enumerate(order):
        words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def _unpack_last_axis(words: Array, order: tuple[int, ...]) -> NDArray[np.int64]:
    rows, width = words.shape
    values = np.zeros((rows, width * 8), dtype=np.int64)
    for nibble, column in enumerate(order):
        values[:, column::8] = (words.view(np.uint32) >> np.uint32(4 * nibble)) & np.uint32(15)
    return values
