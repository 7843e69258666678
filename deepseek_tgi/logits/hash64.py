"""64-bit mixing on plain integers and on int64 tensors, where arithmetic wraps modulo 2^64.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014): the SplitMix64 finaliser.
"""

from __future__ import annotations

import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The int64 that has the bits of `value` modulo 2^64."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def mix(value: int) -> int:
    """A bijection of 64-bit numbers without visible pattern; `value` is taken modulo 2^64, the result is unsigned."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def spread(values: torch.Tensor) -> torch.Tensor:
    """Small numbers (int64) to well-spaced ones; the cheap first half of a hash, a new tensor."""
    return values * signed(_GOLDEN)


def finish_(values: torch.Tensor) -> torch.Tensor:
    """The finaliser on `values` (int64), in place; agrees with `mix` up to the constant that `mix` adds first."""
    values ^= (values >> 30) & (2**34 - 1)
    values *= signed(_MIX_1)
    values ^= (values >> 27) & (2**37 - 1)
    values *= signed(_MIX_2)
    values ^= (values >> 31) & (2**33 - 1)
    return values
