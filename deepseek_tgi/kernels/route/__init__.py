"""Which experts a token goes to, and how much each counts.

`route(logits [T, E] f32, bias [E] f32 | None, routing) -> (ids [T, k] int32, weights [T, k] f32)`, in float32. Scores
the softmax or sigmoid of the logits. The bias (V3's correction) takes part in the choice only; weights are the plain
scores of the chosen, normalised to sum 1 if asked, then times `scale`. Equal scores: the lower id first. The order of a
token's ids is unspecified beyond being fixed; experts' outputs are summed in it.
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
    """`top_k` of `num_experts`, from the best `top_groups` of `num_groups` groups of neighbours."""

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
        self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
