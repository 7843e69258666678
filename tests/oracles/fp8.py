"""Block-scaled 8-bit floats restated in numpy, from the published formats; no product code.

Sources: OCP 8-bit floating point specification 1.0 (E4M3: sign, 4 exponent bits with bias 7, 3 mantissa bits, no
infinities, NaN at S.1111.111); OCP microscaling 1.0 (E8M0: a bare exponent with bias 127, NaN at 255); DeepSeek-V3's
`README_WEIGHTS.md` (`weight_scale_inv`, one float32 for each 128 x 128 block, multiplied to the weight).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 128


def e4m3(codes: Array) -> Array:
    """The float64 values of E4M3 bytes."""
    wide = codes.astype(np.int64)
    exponent, mantissa = wide >> 3 & 15, wide & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size = np.where(wide & 127 == 127, np.nan, size)
    values: Array = np.where(wide & 128, -size, size)
    return values


def e8m0(codes: Array) -> Array:
    """The float64 values of E8M0 bytes."""
    values: Array = np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 127))
    return values


@dataclass(frozen=True)
class Fp8Layer:
    """One layer: `codes [N, K] uint8` (E4M3 bytes) and `scales [ceil(N / rows), ceil(K / columns)] float32`."""

    codes: Array
    scales: Array
    rows: int = BLOCK
    columns: int = BLOCK

    def weight(self) -> Array:
        """`[N, K] float32`: each code times the scale of the block it lies in."""
        n, k = self.codes.shape
        out = np.empty((n, k), np.float32)
        for i in range(n):
            for j in range(k):
                scale = np.float32(self.scales[i // self.rows, j // self.columns])
                out[i, j] = np.float32(e4m3(self.codes[i, j])) * scale
        return out
