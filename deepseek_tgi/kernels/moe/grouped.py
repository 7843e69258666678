"""Grouped experts made of the set's own linear ops: one gather, one product and one scatter for each touched expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import PackedInt4
from deepseek_tgi.kernels.moe import Packed, PackedExperts, check_moe

if TYPE_CHECKING:
    from deepseek_tgi.kernels.dense_linear import DenseLinear
    from deepseek_tgi.kernels.int4_linear import Int4Linear
    from deepseek_tgi.kernels.silu_mul import SiluMul


@dataclass(frozen=True, slots=True)
class GroupedMoe:
    """The op over the linear ops of one set."""

    int4_linear: Int4Linear
    dense_linear: DenseLinear
    silu_mul: SiluMul

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: PackedExperts,
        out: torch.Tensor,
    ) -> None:
        """See the contract."""
        check_moe(x, ids, weights, experts, out)
        order = ids.flatten().sort(stable=True).indices
        counts = torch.bincount(ids.flatten(), minlength=len(experts.down)).tolist()
        rows = order // ids.shape[1]
        results = x.new_empty(order.shape[0], x.shape[1])
        at = 0
        for expert, count in enumerate(counts):
            if count:
                inner = self.silu_mul(self._linear(x[rows[at : at + count]], experts.gate_up[expert]))
                results[order[at : at + count]] = self._linear(inner, experts.down[expert])
                at += count
        out += (results.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def _linear(self, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        if isinstance(weight, PackedInt4):
            return self.int4_linear(x, weight)
        return self.dense_linear(x, weight)
