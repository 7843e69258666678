"""How the published 4-bit formats store one linear layer, restated in numpy; independent of the product.

Input everywhere: codes uint8 [N, K] and zeros uint8 [N, K/g] in 0..15, scales [N, K/g].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Nibbles = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int32]
GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word holds column GEMM_ORDER[i] (AutoAWQ)."""


def pack_words(nibbles: Nibbles, order: tuple[int, ...] = tuple(range(8))) -> Words:
    """[R, C] to int32 [R, C/8]: nibble i (from the low end) of a word holds its column `order[i]`."""
    rows, columns = nibbles.shape
    groups = nibbles.reshape(rows, columns // 8, 8).astype(np.uint32)
    words = np.zeros((rows, columns // 8), np.uint32)
    for i, column in enumerate(order):
        words |= groups[:, :, column] << np.uint32(4 * i)
    return words.view(np.int32)


def awq_gemm(codes: Nibbles, zeros: Nibbles, scales: Any, zero_point: bool) -> dict[str, Any]:
    """`qweight` [K, N/8] and `qzeros` [K/g, N/8] in interleaved order, `scales` [K/g, N]."""
    tensors = {"qweight": pack_words(codes.T, GEMM_ORDER), "scales": scales.T.contiguous()}
    return tensors | ({"qzeros": pack_words(zeros.T, GEMM_ORDER)} if zero_point else {})


def awq_gemv(codes: Nibbles, zeros: Nibbles, scales: Any, zero_point: bool) -> dict[str, Any]:
    """`qweight` [N, K/8] in natural order; `qzeros` [N, W], `scales` [N, 8 W]: the group axis is padded with zeros."""
    n, groups = zeros.shape
    multiple = {32: 4, 64: 2}.get(codes.shape[1] // groups, 1)
    width = math.ceil(math.ceil(groups / 8) / multiple) * multiple
    padded = np.zeros((n, width * 8), np.uint8)
    padded[:, :groups] = zeros
    wide = scales.new_zeros(n, width * 8)
    wide[:, :groups] = scales
    return {"qweight": pack_words(codes), "scales": wide} | ({"qzeros": pack_words(padded)} if zero_point else {})


def compressed_tensors(codes: Nibbles, zeros: Nibbles, scales: Any, zero_point: bool) -> dict[str, Any]:
    """`pack-quantized`: `weight_packed` [N, K/8], `weight_scale` [N, K/g], `weight_zero_point` [N/8, K/g], shape."""
    tensors = {
        "weight_packed": pack_words(codes),
        "weight_scale": scales,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    return tensors | ({"weight_zero_point": pack_words(zeros.T).T} if zero_point else {})


PACKERS = {"awq-gemm": awq_gemm, "awq-gemv": awq_gemv, "compressed-tensors": compressed_tensors}
