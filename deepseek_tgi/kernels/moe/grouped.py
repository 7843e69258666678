"""Grouped experts made of the set's own linear ops: one gather, one product and one scatter for each chosen expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS, PackedInt4
from deepseek_tgi.kernels.moe import Expert, Packed, PackedExperts, check_moe, take_scratch

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
        *,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """See the contract."""
        check_moe(x, ids, weights, experts, out, dtypes=ACTIVATIONS)
        if not len(x):
            return
        scratch = take_scratch(scratch, PackedExperts.scratch_floats(experts, *ids.shape), x.device)
        flat, shares = ids.flatten(), weights.flatten()
        order = flat.sort(stable=True).indices
        chosen, counts = torch.unique_consecutive(flat[order], return_counts=True)
        end = 0
        for expert, count in zip(chosen.tolist(), counts.tolist(), strict=True):
            pairs = order[end : end + count]
            end += count
            rows = pairs // ids.shape[1]
            y = self._run(x, rows, experts.experts[expert], scratch)
            out.index_add_(0, rows, y.float().mul_(shares[pairs].unsqueeze(1)))
        if experts.shared is not None:
            out += self._run(x, torch.arange(x.shape[0], device=x.device), experts.shared, scratch)

    def _run(self, x: torch.Tensor, rows: torch.Tensor, expert: Expert, scratch: torch.Tensor) -> torch.Tensor:
        """Rows `rows` of x through one expert; the result lies in `scratch`."""
        count, hidden, inner = rows.shape[0], x.shape[1], expert.inner_size
        scratch = scratch.view(x.dtype)
        given = scratch[: count * hidden].view(count, hidden)
        gate_up = scratch[count * hidden :][: count * 2 * inner].view(count, 2 * inner)
        gated = scratch[count * (hidden + 2 * inner) :][: count * inner].view(count, inner)
        torch.index_select(x, 0, rows, out=given)
        if expert.order is not None:
            given.copy_(given.index_select(1, expert.order))
        self._linear(given, expert.gate_up, gate_up)
        self.silu_mul(gate_up, gated)
        return self._linear(gated, expert.down, given)

    def _linear(self, x: torch.Tensor, weight: Packed, out: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, PackedInt4):
            return self.int4_linear(x, weight, None, None, out)
        return self.dense_linear(x, weight, None, None, out)
