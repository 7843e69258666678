"""Routing, spelled out: one token, one group, one choice at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.route.check import Out, check_route


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, out: Out | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    ids, weights = check_route(logits, bias, routing, out)
    for t in range(logits.shape[0]):
        ids[t], weights[t] = _one(logits[t], bias, routing)
    return ids, weights


def _one(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    if not bool(logits.isfinite().all()):
        return torch.arange(routing.top_k), torch.full((routing.top_k,), float("nan"))
    if routing.scoring is Scoring.SOFTMAX:
        powers = torch.exp(logits - logits.max())
        scores = powers / powers.sum()
    else:
        scores = 1.0 / (1.0 + torch.exp(-logits))
    ranked = scores if bias is None else scores + bias
    allowed = _allowed(ranked.tolist(), routing)
    ids = _best({expert: float(ranked[expert]) for expert in allowed}, routing.top_k)
    weights = scores[ids]
    if routing.normalise:
        weights = weights / (weights.sum() + 1e-20)
    return torch.tensor(ids), weights * routing.scale


def _allowed(ranked: list[float], routing: Routing) -> list[int]:
    """Experts of the best groups, ascending."""
    size = routing.num_experts // routing.num_groups
    groups = [list(range(begin, begin + size)) for begin in range(0, routing.num_experts, size)]
    if routing.group_rank is GroupRank.NONE:
        return [expert for group in groups for expert in group]
    counted = 2 if routing.group_rank is GroupRank.BEST_TWO else 1
    ranks = {}
    for index, group in enumerate(groups):
        best = sorted((ranked[expert] for expert in group), reverse=True)[:counted]
        ranks[index] = float(torch.tensor(best).sum())  # in float32, as everything here
    kept = _best(ranks, routing.top_groups)
    return [expert for index in sorted(kept) for expert in groups[index]]


def _best(values: dict[int, float], count: int) -> list[int]:
    """Keys of the `count` largest values, largest first; of equal ones the lower key first."""
    return sorted(values, key=lambda key: (-values[key], key))[:count]
