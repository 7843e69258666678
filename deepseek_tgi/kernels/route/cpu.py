"""Routing with torch's operators."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    scores = logits.softmax(-1) if routing.scoring is Scoring.SOFTMAX else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if routing.group_rank is not GroupRank.NONE:
        ranked = ranked.masked_fill(~_kept(ranked, routing), float("-inf"))
    # A stable sort, for topk promises no order among equals.
    ids = ranked.sort(stable=True, dim=-1, descending=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * routing.scale


def _kept(ranked: torch.Tensor, routing: Routing) -> torch.Tensor:
    """`[T, E] bool`: the experts of the best groups."""
    groups = ranked.view(ranked.shape[0], routing.num_groups, -1)
    best = 2 if routing.group_rank is GroupRank.BEST_TWO else 1
    rank = groups.topk(min(best, groups.shape[2]), -1).values.sum(-1)
    chosen = rank.sort(stable=True, dim=-1, descending=True).indices[:, : routing.top_groups]
    mask = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, chosen, True)
    return mask.repeat_interleave(groups.shape[2], 1)
