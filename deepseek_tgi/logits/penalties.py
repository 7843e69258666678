"""Repetition and frequency penalties over the tokens a request has seen, prompt and output alike.

Choice: each request keeps its distinct ids and their counts in two short tensors. Prevents: padding or neighbours
entering the count, and work in the length of the text at each step. Rejected: a `[B, V]` count matrix, which costs
half a megabyte a request at 128k vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

INITIAL_CAPACITY = 64


class SeenTokens:
    """Distinct ids of one request with their counts; owned by the request's sampling state, grows by `add`."""

    __slots__ = ("_counts", "_ids", "_index", "length")

    def __init__(self, ids: Sequence[int]) -> None:
        counts: dict[int, int] = {}
        for token_id in ids:
            counts[token_id] = counts.get(token_id, 0) + 1
        self.length = len(ids)
        self._index = {token_id: place for place, token_id in enumerate(counts)}
        spare = [0] * max(INITIAL_CAPACITY, len(counts))
        self._ids = torch.tensor([*counts, *spare], dtype=torch.int64)
        self._counts = torch.tensor([*counts.values(), *spare], dtype=torch.float32)

    @property
    def ids(self) -> torch.Tensor:
        """Distinct ids `[n] int64`, in order of first appearance."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> torch.Tensor:
        """Occurrences `[n] float32` of `ids`."""
        return self._counts[: len(self._index)]

    def add(self, token_id: int) -> None:
        """Count one more token."""
        self.length += 1
        place = self._index.get(token_id)
        if place is None:
            place = self._index[token_id] = len(self._index)
            if place == len(self._ids):
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
                self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
            self._ids[place] = token_id
        self._counts[place] += 1


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seen: Sequence[SeenTokens],
    repetition: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalise in place the seen ids of `rows` of `logits [B, V] float32`; nothing else is touched.

    Shapes: `rows [n] int64`, `repetition [n]` and `frequency [n]` float32, all on the host, `seen` of length n.
    Repetition r turns a score s of a seen id into s x r if s < 0, else s / r, once an id; then frequency f takes off
    f x occurrences / length of the sequence.
    """
    sizes = torch.tensor([len(s.ids) for s in seen])
    shares = torch.cat([s.counts / max(s.length, 1) for s in seen])
    where = torch.stack((torch.repeat_interleave(rows, sizes), torch.cat([s.ids for s in seen])))
    amounts = torch.stack((repetition.repeat_interleave(sizes), frequency.repeat_interleave(sizes) * shares))
    at, ids = where.to(logits.device, non_blocking=True)
    r, taken = amounts.to(logits.device, non_blocking=True)
    scores = logits[at, ids]
    logits[at, ids] = torch.where(scores < 0, scores * r, scores / r) - taken
