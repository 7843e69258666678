"""Printing 32-bit floats as TGI does: the fewest digits that read back as the same 32-bit number."""

from __future__ import annotations

import math
import struct

_F32 = struct.Struct("f")


def shortest(value: float) -> float | None:
    """The double whose own shortest form is the 32-bit shortest form of `value`; None for infinities and NaN.

    `value` must be exactly a 32-bit number, as protobuf's `float` fields give. JSON has no name for the others.
    """
    if not math.isfinite(value):
        return None
    text = f"{value:.8g}"
    if _same(text, value):
        for digits in range(7, 0, -1):
            shorter = f"{value:.{digits}g}"
            if not _same(shorter, value):
                break
            text = shorter
        return float(text)
    return float(f"{value:.9g}")


def _same(text: str, value: float) -> bool:
    found: float = _F32.unpack(_F32.pack(float(text)))[0]
    return found == value
