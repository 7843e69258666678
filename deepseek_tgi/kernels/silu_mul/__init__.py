"""Gated activation: `silu(gate) * up`.

`silu_mul(gate_up [T, 2I], out [T, I] | None) -> [T, I]`, all activations, computed in float32; gate in the first half
of a row, up in the second.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import FLOAT32, Dtypes, describe, named, refuse

__all__ = ["SiluMul", "check_silu_mul"]


class SiluMul(Protocol):
    """See the module's docstring."""

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


def check_silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None, dtypes: Dtypes = FLOAT32) -> None:
    """Raise `GenerationError` for operands that do not fit."""
    if not (gate_up.dim() == 2 and gate_up.dtype in dtypes and gate_up.shape[1] % 2 == 0 and gate_up.is_contiguous()):
        refuse(f"silu_mul: got {describe('gate_up', gate_up)}, expected [T, 2I] {named(dtypes)}, contiguous")
    if out is not None:
        shape = (gate_up.shape[0], gate_up.shape[1] // 2)
        if not (tuple(out.shape) == shape and out.dtype == gate_up.dtype and out.is_contiguous()):
            refuse(f"silu_mul: got {describe('out', out)}, expected {list(shape)} as gate_up")
