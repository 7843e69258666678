"""TGI's sampling formulae in plain float64 loops over Python lists."""

from __future__ import annotations

import math

INF = math.inf


def log_softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    total = math.log(sum(math.exp(s - top) for s in scores)) + top
    return [s - total for s in scores]


def repetition(scores: list[float], seen: list[int], r: float) -> list[float]:
    out = list(scores)
    for token_id in set(seen):
        out[token_id] = out[token_id] * r if out[token_id] < 0 else out[token_id] / r
    return out


def frequency(scores: list[float], seen: list[int], f: float) -> list[float]:
    return [s - f * seen.count(i) / len(seen) for i, s in enumerate(scores)]


def temperature(scores: list[float], t: float) -> list[float]:
    return [s / t for s in scores]


def top_k(scores: list[float], k: int) -> list[float]:
    threshold = sorted(scores, reverse=True)[min(k, len(scores)) - 1]
    return [s if s >= threshold else -INF for s in scores]


def top_p(scores: list[float], p: float) -> list[float]:
    """Ascending, as the formula is written: drop while the cumulated mass is at most 1 - p, never the largest."""
    probs = [math.exp(v) for v in log_softmax(scores)]
    order = sorted(range(len(scores)), key=lambda i: probs[i])
    out, mass = list(scores), 0.0
    for i in order[:-1]:
        mass += probs[i]
        if mass <= 1 - p:
            out[i] = -INF
    return out


def typical_p(scores: list[float], m: float) -> list[float]:
    logprobs = log_softmax(scores)
    entropy = -sum(math.exp(v) * v for v in logprobs if v > -INF)
    distance = [abs(-v - entropy) for v in logprobs]
    order = sorted(range(len(scores)), key=lambda i: distance[i])
    mass = 0.0
    for last in order:
        mass += math.exp(logprobs[last])
        if mass >= m:
            break
    return [s if d <= distance[last] else -INF for s, d in zip(scores, distance, strict=True)]
