"""Which experts a token goes to, and how much each counts.

`route(logits [T, E] f32, bias [E] f32 | None, routing, out | None) -> (ids [T, k] int32, weights [T, k] f32)`, in
float32. Scores are the softmax or sigmoid of the logits. A token's `k` best experts are chosen by score plus bias (V3's
correction, finite), within its best groups; an expert outside of them is never chosen. Weights are the plain scores of
the chosen: normalised to sum 1 if asked, then times `scale`, each whatever the other is.

A token's ids come in falling order of what they were chosen by; of equal ones the lower id first, of equal groups too.
A group of one expert ranks by that one. A row with a logit that is not finite gets ids 0 .. k-1 and weights NaN: it
fails by itself, downstream, and no index leaves its range. Rows do not depend on each other. `out` is a pair of tensors
to write to.

Choice: experts outside the best groups are put at minus infinity. Prevents: a negative correction bias makes scores
negative, and then experts that were put at 0 win. Of the published gates V2's has 0 (its scores are positive: the same)
and V3's had 0 at first, minus infinity since. Rejected: 0, which breaks the limit that the model was trained under.
Source: DeepSeek-V2 (arXiv 2405.04434) section 2.2, DeepSeek-V3 (arXiv 2412.19437) section 2.1.2, and the `MoEGate` of
the model files published with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["GroupRank", "Route", "Routing", "Scoring"]


class Scoring(Enum):
    """How logits become scores; values are the config's own words."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupRank(Enum):
    """How groups of experts are ranked before experts are: not at all, by their best score, or by their best two."""

    NONE = "greedy"
    BEST = "group_limited_greedy"
    BEST_TWO = "noaux_tc"


@dataclass(frozen=True, slots=True)
class Routing:
    """`top_k` of `num_experts`, from the best `top_groups` of `num_groups` groups of neighbours.

    Equal groups, and no more choices than the kept groups have experts. Without group rank both numbers are 1.
    """

    num_experts: int
    top_k: int
    scoring: Scoring
    group_rank: GroupRank
    num_groups: int
    top_groups: int
    normalise: bool
    scale: float


class Route(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        routing: Routing,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
