"""Gated activation, one row at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.silu_mul import check_silu_mul


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the contract."""
    check_silu_mul(gate_up, out)
    width = gate_up.shape[1] // 2
    y = torch.empty((gate_up.shape[0], width)) if out is None else out
    for t in range(gate_up.shape[0]):
        gate, up = gate_up[t, :width], gate_up[t, width:]
        y[t] = gate / (1.0 + torch.exp(-gate)) * up
    return y
