"""Gated activation: `silu(gate) * up`.

`silu_mul(gate_up [T, 2I] f32, out [T, I] f32 | None) -> [T, I] f32`, gate in the first half of a row, up in the second.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import describe, refuse

__all__ = ["SiluMul", "check_silu_mul"]


class SiluMul(Protocol):
    """See the module's docstring."""

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


def check_silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None) -> None:
    """Raise `GenerationError` for operands that do not fit."""
    if not (
        gate_up.dim() == 2 and gate_up.dtype == torch.float32 and gate_up.shape[1] % 2 == 0 and gate_up.is_contiguous()
    ):
        refuse(f"silu_mul: got {describe('gate_up', gate_up)}, expected [T, 2I] float32, contiguous")
    if out is not None:
        shape = (gate_up.shape[0], gate_up.shape[1] // 2)
        if not (tuple(out.shape) == shape and out.dtype == torch.float32 and out.is_contiguous()):
            refuse(f"silu_mul: got {describe('out', out)}, expected {list(shape)} float32")
