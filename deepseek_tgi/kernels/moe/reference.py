"""Grouped experts, spelled out: one token and one of its experts at a time, on the weights as they are meant."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import PackedInt4
from deepseek_tgi.kernels.moe import Expert, Packed, PackedExperts, check_moe


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: PackedExperts,
    out: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
) -> None:
    """See the contract."""
    check_moe(x, ids, weights, experts, out)
    for t in range(x.shape[0]):
        for choice in sorted(range(ids.shape[1]), key=lambda j: int(ids[t, j])):
            out[t] += weights[t, choice] * _run(x[t], experts.experts[int(ids[t, choice])])
        if experts.shared is not None:
            out[t] += _run(x[t], experts.shared)


def _run(x: torch.Tensor, expert: Expert) -> torch.Tensor:
    """One row through one expert."""
    gate, up = _times(x if expert.order is None else x[expert.order], expert.gate_up).chunk(2)
    return _times(gate / (1.0 + torch.exp(-gate)) * up, expert.down)


def _times(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    weight = packed.dequantise() if isinstance(packed, PackedInt4) else packed.dense()
    return (weight * x).sum(1)
