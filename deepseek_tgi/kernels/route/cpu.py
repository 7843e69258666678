"""Routing with torch's operators."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.route.check import Out, check_route


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, out: Out | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    ids, weights = check_route(logits, bias, routing, out)
    failed = ~logits.isfinite().all(1, keepdim=True)
    logits = logits.masked_fill(failed, 0.0)
    scores = logits.softmax(-1) if routing.scoring is Scoring.SOFTMAX else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if routing.group_rank is not GroupRank.NONE:
        ranked = ranked.masked_fill(~_kept(ranked, routing), float("-inf"))
    # A stable sort, for topk promises no order among equals.
    chosen = ranked.sort(stable=True, dim=-1, descending=True).indices[:, : routing.top_k]
    chosen = torch.where(failed, torch.arange(routing.top_k, device=logits.device), chosen)
    own = scores.gather(1, chosen)
    if routing.normalise:
        own = own / (own.sum(-1, keepdim=True) + 1e-20)
    ids.copy_(chosen)
    weights.copy_((own * routing.scale).masked_fill(failed, float("nan")))
    return ids, weights


def _kept(ranked: torch.Tensor, routing: Routing) -> torch.Tensor:
    """`[T, E] bool`: the experts of the best groups."""
    groups = ranked.view(-1, routing.num_groups, routing.num_experts // routing.num_groups)
    best = 2 if routing.group_rank is GroupRank.BEST_TWO else 1
    rank = groups.topk(min(best, groups.shape[2]), -1).values.sum(-1)
    chosen = rank.sort(stable=True, dim=-1, descending=True).indices[:, : routing.top_groups]
    mask = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, chosen, True)
    return mask.repeat_interleave(groups.shape[2], 1)
