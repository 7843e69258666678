"""Drives an adapter's `step` the way an engine would, with blocks handed out in a shuffled order.

Blocks are never consecutive or ascending except by luck, block 0 is left alone, and every step checks that the logits
are float32 and of the right shape.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import KVMode
from deepseek_tgi.kv.pool import KVPool


@dataclass(slots=True)
class Placed:
    """One request's place in the pool: its blocks and how many tokens are stored."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


Work = tuple[Placed, Sequence[int]]
"""A sequence and the tokens to run for it now."""


class Stepper:
    """A pool, its free blocks, and steps over any mix of sequences."""

    def __init__(self, adapter: ModelAdapter, num_blocks: int = 64, seed: int = 0, mode: KVMode | None = None) -> None:
        """`mode` replaces the number format of the adapter's own layout."""
        layout = adapter.kv_layout
        self.adapter = adapter
        self.pool = KVPool(layout if mode is None else layout.with_mode(mode), num_blocks)
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)

    def slots(self, sequence: Placed, start: int, stop: int) -> list[int]:
        """Slots of positions `start..stop-1`, taking new blocks as needed."""
        size = self.pool.layout.block_size
        while len(sequence.blocks) * size < stop:
            sequence.blocks.append(self._free.pop())
        return [sequence.blocks[p // size] * size + p % size for p in range(start, stop)]

    def forget(self, sequence: Placed) -> None:
        """Take the blocks of a finished sequence back."""
        self._free += sequence.blocks
        sequence.blocks, sequence.length = [], 0

    def inputs(self, work: Sequence[Work], rows: Sequence[int] | None = None) -> ForwardInputs:
        """What an engine would pass; wants all rows unless told."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends = [0]
        for sequence, tokens in work:
            stop = sequence.length + len(tokens)
            slots += self.slots(sequence, sequence.length, stop)
            positions += range(sequence.length, stop)
            ids += tokens
            ends.append(len(ids))
        width = max(len(s.blocks) for s, _ in work)
        tables = [s.blocks + [0] * (width - len(s.blocks)) for s, _ in work]
        return ForwardInputs(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions, dtype=torch.int32),
            slots=torch.tensor(slots),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            cache_lens=torch.tensor([s.length for s, _ in work], dtype=torch.int32),
            logit_rows=torch.tensor(range(len(ids)) if rows is None else rows, dtype=torch.int64),
            max_seqlen=max(len(t) for _, t in work),
            max_context=max(s.length + len(t) for s, t in work),
        )

    def step(self, work: Sequence[Work]) -> list[torch.Tensor]:
        """Logits `[tokens, V]` of each sequence, in the order of `work`; the sequences grow."""
        inputs = self.inputs(work)
        logits = self.adapter.step(inputs, self.pool)
        assert logits.dtype == torch.float32
        assert logits.shape == (len(inputs.input_ids), self.adapter.info.vocab_size)
        for sequence, tokens in work:
            sequence.length += len(tokens)
        ends = inputs.cu_seqlens.tolist()
        return [logits[a:b] for a, b in itertools.pairwise(ends)]

    def run(self, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """One new sequence alone, cut into steps of the sizes in `chunks`, then token by token: logits `[n, V]`."""
        sequence, at, out = Placed(), 0, []
        for size in [*chunks, *[1] * (len(tokens) - sum(chunks))]:
            out += self.step([(sequence, tokens[at : at + size])])
            at += size
        return torch.cat(out)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst row's `|got - expected| / |expected|` (Euclidean), infinite if anything is not finite."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
