"""Launches Triton's kernels without Triton's look at every argument, once a kernel is compiled for such arguments.

Source: Triton's fused softmax tutorial, which launches what was compiled ahead with all arguments in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_ALIGNMENT_BYTES = 16
_WIDE = 1 << 31
"""From here on an integer is passed in 64 bits."""


class TritonLaunches:
    """Owner of one kernel's compiled forms on one device; constants come last among its parameters."""

    def __init__(self, kernel: Any) -> None:
        """`kernel`: what `triton.jit` made."""
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[torch.Tensor | int | float | None],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        key: object,
    ) -> None:
        """Launch on the current stream; `key` says which `constants` and `options` (Triton's own) these are."""
        kinds = (key, *map(_kind, arguments))
        found = self._compiled.get(kinds)
        if found is not None:
            compiled, rest = found
            compiled[grid](*arguments, *rest)
            return
        made = self._kernel[grid](*arguments, **constants, **options)
        if hasattr(made, "packed_metadata"):  # an interpreter has nothing to launch again
            names = self._kernel.arg_names[len(arguments) :]
            self._compiled[kinds] = made, tuple(constants[name] for name in names)


def _kind(value: torch.Tensor | int | float | None) -> object:
    """What of an argument a compiled form may rest on: two of one kind are never compiled apart."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _ALIGNMENT_BYTES == 0
    if isinstance(value, int):
        return value == 1, value % _ALIGNMENT_BYTES == 0, -_WIDE <= value < _WIDE
    return type(value)
