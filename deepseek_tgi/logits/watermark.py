"""The watermark of TGI: each token makes a random part of the vocabulary slightly likelier for the next one.

Source: Kirchenbauer et al., "A Watermark for Large Language Models" (2023), with TGI's hash key.
"""

from __future__ import annotations

from functools import lru_cache

import torch

HASH_KEY = 15485863
CACHED_LISTS = 32
"""A list takes four bytes times the vocabulary; drawing one takes half a millisecond."""


class Watermark:
    """`gamma` is the share of the vocabulary that is favoured, `delta` what is added to its scores."""

    def __init__(self, gamma: float = 0.5, delta: float = 2.0) -> None:
        self._gamma = gamma
        self._delta = delta
        self._favoured = lru_cache(maxsize=CACHED_LISTS)(self._draw)

    def apply(self, row: torch.Tensor, previous_id: int) -> None:
        """Favour in place, in `row [V]`, the ids that follow from the token before."""
        row[self._favoured(previous_id, len(row), row.device)] += self._delta

    def _draw(self, previous_id: int, vocab_size: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(HASH_KEY * previous_id)
        return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * self._gamma)].to(device)
