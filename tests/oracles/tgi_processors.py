"""TGI's whole chain of logits processors for one sequence: the single formulae of `oracles.sampling` in TGI's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles import sampling

Array = NDArray[np.float64]
WATERMARK_KEY = 15485863


def processed_logprobs(logits: Sequence[float], history: Sequence[int], **p: Any) -> Array:
    """Log-probabilities over the vocabulary after every processor that `p` switches on; masked ids are -inf."""
    scores, ids = [float(x) for x in logits], list(history)
    # Parameters travel as 32-bit floats.
    p = {name: float(np.float32(value)) if isinstance(value, float) else value for name, value in p.items()}
    if p.get("watermark"):
        scores = watermark(scores, ids[-1])
    if p.get("repetition_penalty", 1.0) != 1.0:
        scores = sampling.repetition(scores, ids, p["repetition_penalty"])
    if p.get("frequency_penalty", 0.0) != 0.0:
        scores = sampling.frequency(scores, ids, p["frequency_penalty"])
    if p.get("temperature", 1.0) != 1.0:
        scores = sampling.temperature(scores, p["temperature"])
    if p.get("top_k", 0):
        scores = sampling.top_k(scores, p["top_k"])
    if p.get("top_p", 1.0) < 1.0:
        scores = sampling.top_p(scores, p["top_p"])
    if p.get("typical_p", 1.0) < 1.0:
        scores = sampling.typical_p(scores, p["typical_p"])
    return np.asarray(sampling.log_softmax(scores))


def watermark(scores: Sequence[float], previous: int, gamma: float = 0.5, delta: float = 2.0) -> list[float]:
    """Favour the part of the vocabulary that the previous id selects."""
    import torch

    generator = torch.Generator().manual_seed(WATERMARK_KEY * previous)
    chosen = set(torch.randperm(len(scores), generator=generator)[: int(gamma * len(scores))].tolist())
    return [score + delta if i in chosen else score for i, score in enumerate(scores)]
