"""Gated activation, vectorised."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.silu_mul import check_silu_mul


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the contract."""
    check_silu_mul(gate_up, out, ACTIVATIONS)
    gate, up = gate_up.chunk(2, 1)
    if gate_up.dtype == torch.float32:
        return torch.mul(torch.nn.functional.silu(gate), up, out=out)
    y = torch.nn.functional.silu(gate.float()).mul_(up)
    return y.to(gate_up.dtype) if out is None else out.copy_(y)
