"""Waiting requests and the rules by which they are admitted into a batch (TGI's `next_batch`)."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.blocks import BlockAllocator
from deepseek_tgi.router.entry import Entry
from deepseek_tgi.router.metrics import RouterMetrics
from deepseek_tgi.router.startup import ShardFacts


@dataclass(frozen=True, slots=True)
class Budget:
    """What one admission may take; `min_size` and `max_size` None mean any."""

    prefill_tokens: int
    total_tokens: int
    min_size: int | None = None
    max_size: int | None = None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """Requests admitted together, by id, and their wire form."""

    entries: dict[int, Entry]
    message: pb.Batch


class RequestQueue:
    """Owner of the waiting entries, first come first served. Hands blocks to those it admits."""

    def __init__(self, facts: ShardFacts, blocks: BlockAllocator | None, metrics: RouterMetrics) -> None:
        self._facts = facts
        self._blocks = blocks
        self._metrics = metrics
        self._waiting: OrderedDict[int, Entry] = OrderedDict()
        self._next_batch_id = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, entry: Entry) -> None:
        """Put an entry at the end."""
        self._waiting[entry.id] = entry
        self._metrics.gauge("tgi_queue_size", len(self._waiting))

    def discard(self, entry: Entry) -> bool:
        """Take out an entry whose client is gone; false if it is not waiting."""
        if self._waiting.pop(entry.id, None) is None:
            return False
        self._metrics.count("tgi_request_failure", label='err="dropped"')
        self._metrics.gauge("tgi_queue_size", len(self._waiting))
        return True

    def take_all(self) -> list[Entry]:
        """Empty the queue."""
        entries = list(self._waiting.values())
        self._waiting.clear()
        self._metrics.gauge("tgi_queue_size", 0)
        return entries

    def next_batch(self, budget: Budget) -> NewBatch | None:
        """Admit what fits, from the front; None if nothing does."""
        minimum = budget.min_size or 0
        if not self._waiting or len(self._waiting) < minimum or budget.max_size == 0:
            return None
        if budget.prefill_tokens <= 0 or budget.total_tokens <= 0:
            return None
        admitted = self._admit_padded(budget) if self._blocks is None else self._admit_blocks(budget)
        if not admitted:
            return None
        if len(admitted) < minimum:
            self._put_back([entry for entry, _, _ in admitted])
            return None
        return self._batch(admitted)

    def _admit_blocks(self, budget: Budget) -> list[tuple[Entry, int, int | None]]:
        """Entries with their `cache_len` and `chunk_len`. Blocks are the limit, not the total budget."""
        assert self._blocks is not None
        size = self._facts.block_size
        room = -(-budget.prefill_tokens // size) * size
        admitted: list[tuple[Entry, int, int | None]] = []
        while self._waiting and room and (budget.max_size is None or len(admitted) < budget.max_size):
            entry = self._front()
            job = entry.job
            needed = len(job.input_ids) + job.max_new_tokens + self._facts.speculate - 1
            found = self._blocks.allocate(needed, None if job.prefill_logprobs else job.input_ids)
            if found is None:
                break
            postfix = len(job.input_ids) - found.cache_len
            if postfix > room and not self._facts.support_chunking:
                self._blocks.release(found)
                break
            del self._waiting[entry.id]
            entry.allocation = found
            self._metrics.count("deepseek_tgi_prompt_tokens", len(job.input_ids))
            self._metrics.count("deepseek_tgi_prompt_tokens_reused", found.cache_len)
            admitted.append((entry, found.cache_len, room if postfix > room else None))
            room -= min(postfix, room)
        return admitted

    def _admit_padded(self, budget: Budget) -> list[tuple[Entry, int, int | None]]:
        """Every prompt counts as long as the longest one: for shards that pad."""
        admitted: list[tuple[Entry, int, int | None]] = []
        longest = decode = 0
        while self._waiting and (budget.max_size is None or len(admitted) < budget.max_size):
            entry = self._front()
            longest = max(longest, len(entry.job.input_ids))
            prefill = (len(admitted) + 1) * longest
            decode += entry.job.max_new_tokens
            if prefill > budget.prefill_tokens or prefill + decode + self._facts.speculate > budget.total_tokens:
                break
            del self._waiting[entry.id]
            admitted.append((entry, 0, None))
        return admitted

    def _front(self) -> Entry:
        return next(iter(self._waiting.values()))

    def _put_back(self, entries: list[Entry]) -> None:
        for entry in reversed(entries):
            if self._blocks is not None and entry.allocation is not None:
                self._blocks.release(entry.allocation)
            entry.allocation = None
            self._waiting[entry.id] = entry
            self._waiting.move_to_end(entry.id, last=False)

    def _batch(self, admitted: list[tuple[Entry, int, int | None]]) -> NewBatch:
        now = time.monotonic()
        for entry, _, _ in admitted:
            entry.admitted_at = now
        requests = [entry.message(cache_len, chunk_len) for entry, cache_len, chunk_len in admitted]
        prompt = sum(len(entry.job.input_ids) - cache_len for entry, cache_len, _ in admitted)
        decode = sum(entry.job.max_new_tokens for entry, _, _ in admitted) if self._blocks is None else 0
        message = pb.Batch(
            id=self._next_batch_id,
            requests=requests,
            size=len(requests),
            max_tokens=prompt + decode,
            max_blocks=max(len(request.blocks) for request in requests),
        )
        self._next_batch_id += 1
        self._metrics.observe("tgi_batch_next_size", len(admitted))
        self._metrics.gauge("tgi_queue_size", len(self._waiting))
        return NewBatch({entry.id: entry for entry, _, _ in admitted}, message)
