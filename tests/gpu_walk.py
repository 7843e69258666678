"""Requests driven by hand through a whole model, here or by ranks that are processes of their own, a GPU each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.pool import KVPool

NEW_TOKENS = 12
LIMIT_S = 240.0
T = TypeVar("T")


class Walk:
    """Requests driven by hand over one pool: prompts in one step, then all decode together."""

    def __init__(self, adapter: ModelAdapter, prompts: Sequence[Sequence[int]]) -> None:
        self.adapter = adapter
        size = adapter.kv_layout.block_size
        columns = -(-(max(map(len, prompts)) + NEW_TOKENS + 1) // size)
        self.pool = KVPool(adapter.kv_layout, 1 + columns * len(prompts), adapter.info.device)
        self.tables = (torch.randperm(columns * len(prompts)) + 1).int().view(len(prompts), columns)
        self.lengths = [0] * len(prompts)
        self.best: list[list[int]] = []
        """What recorded steps chose."""
        adapter.open_pool(self.pool, len(prompts), columns * size)
        self.logits = [self._feed(prompts)]

    def decode(self, tokens: Sequence[int]) -> None:
        """One more token for each request."""
        self.feed([[token] for token in tokens])

    def feed(self, pieces: Sequence[Sequence[int]]) -> None:
        """So many more tokens of each."""
        self.logits.append(self._feed(pieces))

    def _feed(self, pieces: Sequence[Sequence[int]]) -> torch.Tensor:
        size = self.adapter.kv_layout.block_size
        counts = [len(piece) for piece in pieces]
        positions = [torch.arange(done, done + n) for done, n in zip(self.lengths, counts, strict=True)]
        slots = [
            table[place // size].long() * size + place % size
            for table, place in zip(self.tables, positions, strict=True)
        ]
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        logits = self.adapter.step(
            ForwardInputs(
                input_ids=torch.tensor([token for piece in pieces for token in piece]),
                positions=torch.cat(positions).int(),
                slots=torch.cat(slots),
                cu_seqlens=offsets,
                block_tables=self.tables,
                cache_lens=torch.tensor(self.lengths, dtype=torch.int32),
                logit_rows=offsets[1:].long() - 1,
                max_seqlen=max(counts),
                max_context=max(done + n for done, n in zip(self.lengths, counts, strict=True)),
            ),
            self.pool,
        )
        self.lengths = [done + n for done, n in zip(self.lengths, counts, strict=True)]
        best = self.adapter.best_of(logits)
        if best is not None:
            self.best.append([int(token) for token in best[0].tolist()])
        return logits.cpu().clone()

    def close(self) -> None:
        self.adapter.close_pool()
        self.pool.close()


@contextmanager
def loaded(folder: Path | str, options: LoadOptions) -> Iterator[ModelAdapter]:
    adapter = QuantizedModelAdapter.get_model(str(folder), options=options)
    try:
        yield adapter
    finally:
        adapter.close()


def walked(
    folder: Path | str, options: LoadOptions, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]] = ()
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Logits of every step and the tokens fed: the greedy ones, unless `tokens` are given."""
    with loaded(folder, options) as adapter:
        torch.manual_seed(3)
        walk = Walk(adapter, prompts)
        fed: list[list[int]] = []
        for step in range(NEW_TOKENS):
            fed.append(list(tokens[step]) if tokens else walk.logits[-1].argmax(-1).tolist())
            walk.decode(fed[-1])
        walk.close()
        return walk.logits, fed


def on_processes(world_size: int, work: Callable[[int], T]) -> list[T]:
    """`work(rank)` in a fresh process each, all at once; results in rank order, or the first error.

    Threads of one process would not do on GPUs: one that asks the driver for memory waits for all devices that reach
    each other, and so for the sum that another thread waits in. `work` and what it returns can be pickled.
    """
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(world_size, mp_context=fresh) as pool:
        futures = [pool.submit(work, rank) for rank in range(world_size)]
        try:
            return [future.result(LIMIT_S) for future in futures]
        finally:
            for process in list(pool._processes.values()):
                process.kill()  # one that waits for another that has failed
