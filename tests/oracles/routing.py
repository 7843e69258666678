"""Routing of experts restated in numpy float64, from the papers and the gates that DeepSeek published.

DeepSeek-V2 (arXiv 2405.04434), equations 20 to 23 and section 2.2.2; DeepSeek-V3 (arXiv 2412.19437), equations 12 to 16
and section 2.1.2; `MoEGate` of both models' `modeling_deepseek.py` and `Gate` of V3's `inference/model.py`.
V2's file applies the scaling factor only where it does not normalise; its models never do both, and here as in V3 the
two are independent. Written by sorting with an explicit key, so that ties and the order are what is said, not what a
library does: larger first, then the lower number.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Gate:
    """A gate as `config.json` states it, in the config's words."""

    n_routed_experts: int
    num_experts_per_tok: int
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True)
class Choice:
    """One token's experts in order, their weights, and the narrowest gap that any of its decisions was made by."""

    ids: list[int]
    weights: list[float]
    margin: float


def route(logits: Array, bias: Array | None, gate: Gate) -> Choice:
    """The choice for one token's `logits [E]`."""
    wide = [float(x) for x in logits]
    if not all(math.isfinite(x) for x in wide):
        return Choice(list(range(gate.num_experts_per_tok)), [math.nan] * gate.num_experts_per_tok, math.inf)
    scores = _softmax(wide) if gate.scoring_func == "softmax" else [1 / (1 + math.exp(-x)) for x in wide]
    biased = scores if bias is None else [s + float(b) for s, b in zip(scores, bias, strict=True)]
    allowed, group_margin = _allowed(biased, gate)
    order = sorted(allowed, key=lambda e: (-biased[e], e))
    ids = order[: gate.num_experts_per_tok]
    contest = [biased[e] for e in order[: gate.num_experts_per_tok + 1]]
    gaps = [high - low for high, low in itertools.pairwise(contest)]
    weights = [scores[e] for e in ids]
    if gate.norm_topk_prob:
        total = sum(weights) + 1e-20
        weights = [w / total for w in weights]
    weights = [w * gate.routed_scaling_factor for w in weights]
    return Choice(ids, weights, min([group_margin, *gaps]))


def _softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [p / sum(powers) for p in powers]


def _allowed(biased: list[float], gate: Gate) -> tuple[list[int], float]:
    """Experts that may be chosen, and the gap between the last group kept and the first refused."""
    experts = np.arange(gate.n_routed_experts)
    if gate.topk_method == "greedy":
        return experts.tolist(), math.inf
    groups = experts.reshape(gate.n_group, -1)
    best = {"group_limited_greedy": 1, "noaux_tc": 2}[gate.topk_method]
    ranks = [sum(sorted((biased[e] for e in group), reverse=True)[:best]) for group in groups]
    order = sorted(range(gate.n_group), key=lambda g: (-ranks[g], g))
    kept, refused = order[: gate.topk_group], order[gate.topk_group :]
    margin = ranks[kept[-1]] - ranks[refused[0]] if refused else math.inf
    return [int(e) for g in kept for e in groups[g]], margin
