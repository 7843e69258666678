"""The precision of matrix products, as a value. No torch here."""

from __future__ import annotations

from enum import Enum


class ComputeDtype(Enum):
    """Precision of the matrix products; accumulation is float32 (or exact integers) in both, activations are float32.

    `BFLOAT16` promises an error no larger than rounding every activation to bfloat16 would give; weights stay exact.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def int4_group(width: int) -> int:
    """Elements of a cached key or value of `width` that share a scale at INT4."""
    return 4 if width <= 64 else 8 if width <= 128 else 16
