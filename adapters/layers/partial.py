"""Products of which each rank computes a part: a product over some of the inputs, added up over all ranks.

Choice: the first rank adds its part to the residual stream, the others add theirs to nothing, and one all-reduce gives
every rank the stream with the whole sum. Prevents: a second pass for what a step does twice a layer, and a residual or
bias that is counted once a rank. Rejected: summing the parts aside and adding them.
"""

from __future__ import annotations

import torch

from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.kernels.select import KernelSet


class PartialSum:
    """Parts that several products add to the stream `hidden [T, H]`, between `begin` and `end`."""

    def __init__(self, group: RankGroup | None) -> None:
        """`group` None: the parts are whole."""
        self._group = group

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """What this rank's parts are added to."""
        return hidden if self._group is None else self._group.parts_of(hidden)

    def end(self, hidden: torch.Tensor, parts: torch.Tensor) -> None:
        """Make `hidden` the stream with the sum of all ranks' parts, bit for bit the same on each."""
        if self._group is not None:
            self._group.all_reduce(hidden, parts)


class PartialLinear(Linear):
    """A product over this rank's inputs; the result is the sum of all ranks'. The bias is the first rank's to add."""

    def __init__(self, kernels: KernelSet, own: Linear, group: RankGroup) -> None:
        super().__init__(kernels)
        self._own = own
        self._group = group

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self._own.nbytes

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """See `Linear`; `out` is dense."""
        self._own(x, residual if self._group.first else None, out)
        self._group.all_reduce(out)
        return out

    def after_silu(
        self, gate_up: torch.Tensor, scratch: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """See `Linear`; `out` is dense."""
        self._own.after_silu(gate_up, scratch, residual if self._group.first else None, out)
        self._group.all_reduce(out)
