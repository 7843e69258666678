"""From the residual stream to the experts of each token: norm, router and choice as one op.

`choose(hidden [T, H] f32, gate, routing, *, norm_weight [H] f32, eps, bias [E] f32 | None, normed [T, H], logits [T, E]
f32, out)` is `rms_norm` into `normed`, the exact product of that by `gate` and `route` of it into `out`, ids and
weights, in the words of those ops. What `logits` holds afterwards is left open. All are dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from deepseek_tgi.kernels.common import PackedDense
    from deepseek_tgi.kernels.route import Routing

__all__ = ["ChooseExperts"]


class ChooseExperts(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        hidden: torch.Tensor,
        gate: PackedDense,
        routing: Routing,
        *,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        normed: torch.Tensor,
        logits: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None: ...
