"""Greedy decoding with `transformers`, the whole sequence recomputed at every step, so that no cache can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class GreedyOracle:
    """Answers for one model, remembered, since tests ask for the same prompts again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], tuple[int, torch.Tensor]] = {}

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-softmax of the logits at every position, `[len(ids), V] float32`."""
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([list(ids)])).logits[0]
        result: torch.Tensor = logits.float().log_softmax(-1)
        return result

    def _next(self, ids: tuple[int, ...]) -> tuple[int, torch.Tensor]:
        if ids not in self._known:
            row = self.logprobs(ids)[-1]
            self._known[ids] = (int(row.argmax()), row)
        return self._known[ids]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next `count` ids, EOS or not."""
        ids = tuple(prompt)
        for _ in range(count):
            ids = (*ids, self._next(ids)[0])
        return list(ids[len(prompt) :])

    def greedy_logprobs(self, prompt: Sequence[int], count: int) -> list[float]:
        """Log-probability of each of those ids."""
        ids, out = tuple(prompt), []
        for _ in range(count):
            token, row = self._next(ids)
            out.append(float(row[token]))
            ids = (*ids, token)
        return out

    def keys(self, ids: Sequence[int]) -> torch.Tensor:
        """Keys of layer 0 as `transformers` caches them, heads side by side, `[len(ids), G * D]`."""
        with torch.inference_mode():
            cache = self._model(input_ids=torch.tensor([list(ids)]), use_cache=True).past_key_values
        keys = cache.layers[0].keys[0]  # [G, T, D]
        side_by_side: torch.Tensor = keys.transpose(0, 1).reshape(len(ids), -1)
        return side_by_side
