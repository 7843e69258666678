"""GPTQ checkpoints restated in numpy, from the published layout; no product code.

A layer is `codes [N, K]`, `zeros [N, G]` (0..15), `scales [N, G]` and `group [K]`, the group of each input, with
`weight[n, k] = (codes[n, k] - zeros[n, group[k]]) * scales[n, group[k]]`. Codes are stored in file order whatever the
groups. Loops are welcome here: this is the slow truth.

Sources: AutoGPTQ `nn_modules/qlinear` (`pack`) and GPTQModel `utils/model.py` (v1 to v2 and back: one is taken from, or
given to, every 4 bits of a word in one subtraction of 0x11111111, so that a zero of 0 borrows from its neighbour).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class GptqLayer:
    """One quantised layer in plain numbers."""

    codes: Array
    zeros: Array
    scales: Array
    group: Array

    def weight(self) -> Array:
        """`[N, K] float32`."""
        out = np.empty(self.codes.shape, np.float32)
        for k, group in enumerate(self.group):
            steps = (self.codes[:, k] - self.zeros[:, group]).astype(np.float32)
            out[:, k] = steps * self.scales[:, group].astype(np.float32)
        return out


def natural_groups(k: int, size: int) -> Array:
    """Groups of neighbours; the last may be short."""
    return np.arange(k) // size


def sorted_groups(k: int, size: int, seed: int = 0) -> Array:
    """Groups as activation order makes them: the i-th input of a random ranking belongs to group `i // size`."""
    group = np.empty(k, np.int64)
    group[np.random.default_rng(seed).permutation(k)] = natural_groups(k, size)
    return group


def random_layer(n: int, k: int, size: int, seed: int = 0, symmetric: bool = False, ordered: bool = False) -> GptqLayer:
    """A layer with every code value; zeros from 0 to 15, or all of them 8."""
    rng = np.random.default_rng(seed)
    groups = -(-k // size)
    zeros = np.full((n, groups), 8) if symmetric else rng.integers(0, 16, (n, groups))
    scales = (rng.random((n, groups)) * 0.02 + 0.005).astype(np.float16)
    group = sorted_groups(k, size, seed) if ordered else natural_groups(k, size)
    return GptqLayer(rng.integers(0, 16, (n, k)), zeros, scales, group)


def gptq_tensors(layer: GptqLayer, version: int = 1) -> dict[str, Array]:
    """`qweight [K/8, N]`, `qzeros [G, N/8]`, `scales [G, N]` and `g_idx [K]`, as `checkpoint_format` says."""
    zeros = _words(layer.zeros.T)
    if version == 1:
        zeros = zeros - np.uint32(0x11111111)
    return {
        "qweight": np.ascontiguousarray(_words(layer.codes).T).view(np.int32),
        "qzeros": zeros.view(np.int32),
        "scales": np.ascontiguousarray(layer.scales.T),
        "g_idx": layer.group.astype(np.int32),
    }


def _words(values: Array) -> NDArray[np.uint32]:
    """Eight neighbours of the last axis in a word, the first one lowest; a short last word is filled with zeros."""
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // 8)), np.uint32)
    for column in range(columns):
        words[:, column // 8] |= values[:, column].astype(np.uint32) << np.uint32(4 * (column % 8))
    return words
