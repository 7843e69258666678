"""The batching loop: one task that decides what the shards do next and gives their answers to those who wait.

Source: TGI's `backends/v3/src/backend.rs`, both loops (with and without chunked prefill). Where it differs, on purpose:
a client that left is dropped after the step in flight and not at its next token; an error of FilterBatch or ClearCache
fails the requests concerned instead of ending the loop; `max_batch_size` holds with chunking too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.blocks import BlockAllocator
from deepseek_tgi.router.client import ShardClient, Step
from deepseek_tgi.router.entry import Delivery, Entry, Job, Mailbox
from deepseek_tgi.router.errors import IncompleteGenerationError, ShardError
from deepseek_tgi.router.liveness import Liveness
from deepseek_tgi.router.metrics import RouterMetrics
from deepseek_tgi.router.queue import Budget, NewBatch, RequestQueue
from deepseek_tgi.router.startup import ShardFacts

logger = logging.getLogger(__name__)
R = TypeVar("R")
Entries = dict[int, Entry]


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """When waiting requests may join a running batch (without chunking), and how large it may be."""

    waiting_served_ratio: float
    max_waiting_tokens: int
    max_batch_size: int | None = None


class Scheduler:
    """Owner of the running entries. `submit` may be called at any time; `run` is the one task that talks to shards."""

    def __init__(
        self, shards: ShardClient, facts: ShardFacts, policy: BatchPolicy, metrics: RouterMetrics, liveness: Liveness
    ) -> None:
        self._shards = shards
        self._facts = facts
        self._policy = policy
        self._metrics = metrics
        self._liveness = liveness
        self.blocks = (
            None if facts.requires_padding else BlockAllocator(facts.num_blocks, facts.block_size, facts.prefix_caching)
        )
        self._queue = RequestQueue(facts, self.blocks, metrics)
        self._running: Entries = {}
        self._arrived = asyncio.Event()
        self._outbox: list[tuple[Mailbox, Delivery]] = []
        self._next_entry_id = 0
        self._serving = False
        if self.blocks is not None:
            metrics.gauge("deepseek_tgi_kv_blocks_total", self.blocks.usable_blocks)
        self._show()

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing runs, not even for a client that is gone."""
        return not self._serving and not self._queue

    def submit(self, job: Job) -> Entry:
        """Queue a job. The caller reads `entry.mailbox`, and calls `entry.cancel()` when it stops before the end."""
        entry = Entry(self._next_entry_id, job, on_cancel=self._cancelled)
        self._next_entry_id += 1
        entry.trace = self._shards.spans.current()
        self._queue.append(entry)
        self._arrived.set()
        return entry

    def end_all(self, error: DeepseekTgiError) -> None:
        """End every request, waiting or running, with an error; the shard is rid of them after the step in flight."""
        for entry in self._queue.take_all():
            entry.mailbox.put(error)
        for entry in self._running.values():
            entry.cancelled = True
            self._outbox.append((entry.mailbox, error))
        self._deliver()

    async def run(self) -> None:
        """Serve for ever."""
        first = Budget(
            self._facts.max_batch_prefill_tokens,
            self._facts.max_batch_total_tokens,
            max_size=self._policy.max_batch_size,
        )
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while (batch := self._queue.next_batch(first)) is not None:
                self._serving = True
                await self._serve(batch)
                self._serving = False
                self._show()

    async def _serve(self, batch: NewBatch) -> None:
        """From a first batch until nothing runs any more."""
        cached = await self._prefill(batch)
        waiting_tokens = 1
        while cached is not None:
            self._metrics.gauge("tgi_batch_current_size", cached.size)
            self._metrics.gauge("tgi_batch_current_max_tokens", cached.max_tokens)
            batches = [cached]
            joining = self._queue.next_batch(self._joining_budget(cached, waiting_tokens))
            if joining is not None:
                self._count_concat(joining, waiting_tokens)
                waiting_tokens = 1
                if self._facts.support_chunking:
                    merged = await self._prefill(joining, cached)
                    batches = [] if merged is None else [merged]
                else:
                    added = await self._prefill(joining)
                    batches += [] if added is None else [added]
            if not batches:
                break
            cached = await self._decode(batches)
            waiting_tokens += 1

    def _joining_budget(self, cached: pb.CachedBatch, waiting_tokens: int) -> Budget:
        size = self._policy.max_batch_size
        room = None if size is None else max(0, size - cached.size)
        total = max(0, self._facts.max_batch_total_tokens - cached.max_tokens)
        if self._facts.support_chunking:
            return Budget(max(0, self._facts.max_batch_prefill_tokens - cached.current_tokens), total, max_size=room)
        overdue = waiting_tokens >= self._policy.max_waiting_tokens
        minimum = None if overdue else int(cached.size * self._policy.waiting_served_ratio)
        return Budget(self._facts.max_batch_prefill_tokens, total, minimum, room)

    def _count_concat(self, joining: NewBatch, waiting_tokens: int) -> None:
        if self._facts.support_chunking:
            reason = "chunking"
        else:
            reason = "wait_exceeded" if waiting_tokens >= self._policy.max_waiting_tokens else "backpressure"
        self._metrics.count("tgi_batch_concat", label=f'reason="{reason}"')

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _prefill(self, batch: NewBatch, cached: pb.CachedBatch | None = None) -> pb.CachedBatch | None:
        """One step for new requests. With `cached` its requests take part, and the result stands for both."""
        joined = cached is not None
        entries = {**self._running, **batch.entries} if joined else batch.entries
        self._running.update(batch.entries)
        ids = [batch.message.id] if cached is None else [batch.message.id, cached.id]
        linked = [entry.trace for entry in batch.entries.values()]
        return await self._step("prefill", self._shards.prefill(batch.message, cached, linked=linked), entries, ids)

    async def _decode(self, batches: Sequence[pb.CachedBatch]) -> pb.CachedBatch | None:
        """One step for everything that runs."""
        return await self._step("decode", self._shards.decode(batches), dict(self._running), [b.id for b in batches])

    async def _step(
        self, method: str, call: Awaitable[Step], entries: Entries, batch_ids: list[int]
    ) -> pb.CachedBatch | None:
        """Await a step of `entries` and settle what it brought; the batch to go on with, None if nothing is left."""
        label = f'method="{method}"'
        started = time.monotonic()
        self._metrics.count("tgi_batch_inference_count", label=label)
        try:
            answer = await self._under_way(call)
        except ShardError as error:
            self._metrics.count("tgi_batch_inference_failure", label=label)
            logger.error("%s failed: %s", method, error, extra={"fields": {"batches": batch_ids}})
            self._liveness.suspect()
            self._drop(entries, error)
            await self._clear(batch_ids)
            return None
        self._metrics.count("tgi_batch_inference_success", label=label)
        self._metrics.observe("tgi_batch_inference_duration", time.monotonic() - started, label)
        self._metrics.observe("tgi_batch_forward_duration", answer.forward_ns / 1e9, label)
        self._metrics.observe("tgi_batch_decode_duration", answer.decode_ns / 1e9, label)
        if answer.HasField("concat_ns"):
            self._metrics.observe("tgi_batch_concat_duration", answer.concat_ns / 1e9, 'method="decode"')
        self._settle(answer, entries)
        return await self._narrow(answer, entries, label)

    async def _under_way(self, call: Awaitable[R]) -> R:
        """Let the call leave, then wake those who wait for the step before it: their work overlaps the shard's."""
        if self._outbox:
            await asyncio.sleep(0)
            self._deliver()
        return await call

    def _settle(self, answer: Step, entries: Entries) -> None:
        """Sort the generations into mailboxes; free what ended and whose client is gone. `entries` keeps the rest."""
        for generation in answer.generations:
            entry = entries.get(generation.request_id)
            if entry is None:
                logger.error("the shard reported request %d, which is not in this batch", generation.request_id)
                continue
            outcome = _outcome(generation)
            if isinstance(outcome, ShardError):
                self._liveness.suspect()
            elif not entry.prefilled:
                entry.prefilled = True
                if self.blocks is not None and entry.allocation is not None:
                    self.blocks.commit(entry.allocation)
            self._outbox.append((entry.mailbox, outcome))
            if generation.HasField("generated_text"):
                self._release(entries.pop(entry.id))
        for entry in [entry for entry in entries.values() if entry.cancelled]:
            self._release(entries.pop(entry.id))

    async def _narrow(self, answer: Step, entries: Entries, label: str) -> pb.CachedBatch | None:
        """Make the shard's batch hold exactly `entries`."""
        if not answer.HasField("batch"):
            self._drop(entries, IncompleteGenerationError())
            return None
        batch = answer.batch
        if batch.size == len(entries):
            return batch
        started = time.monotonic()
        if not entries:
            await self._clear([batch.id])
            return None
        try:
            kept = await self._under_way(self._shards.filter_batch(batch.id, entries))
        except ShardError as error:
            logger.error("filter of batch %d failed: %s", batch.id, error)
            self._liveness.suspect()
            self._drop(entries, error)
            await self._clear([batch.id])
            return None
        self._metrics.observe("tgi_batch_filter_duration", time.monotonic() - started, label)
        if not kept.HasField("batch"):
            self._drop(entries, IncompleteGenerationError())
            return None
        return kept.batch

    # --- ends -------------------------------------------------------------------------------------------------------

    def _release(self, entry: Entry) -> None:
        self._running.pop(entry.id, None)
        if self.blocks is not None and entry.allocation is not None:
            self.blocks.release(entry.allocation)
            entry.allocation = None

    def _drop(self, entries: Entries, error: DeepseekTgiError) -> None:
        """End `entries` with an error, after what they were sent already."""
        for entry in list(entries.values()):
            self._outbox.append((entry.mailbox, error))
            self._release(entry)
        entries.clear()
        self._deliver()

    async def _clear(self, batch_ids: list[int]) -> None:
        for batch_id in batch_ids:
            try:
                await self._under_way(self._shards.clear_cache(batch_id))
            except ShardError as error:
                logger.error("clearing batch %d failed: %s", batch_id, error)

    def _deliver(self) -> None:
        for mailbox, item in self._outbox:
            mailbox.put(item)
        self._outbox.clear()

    def _cancelled(self, entry: Entry) -> None:
        self._metrics.count("deepseek_tgi_request_cancelled")
        self._queue.discard(entry)

    def _show(self) -> None:
        """Between batches: everything out, gauges at rest."""
        self._deliver()
        self._metrics.gauge("tgi_batch_current_size", 0)
        self._metrics.gauge("tgi_batch_current_max_tokens", 0)


def _outcome(generation: pb.Generation) -> Delivery:
    """The generation, or the error it stands for.

    The wire has errors for whole steps only. So our shard ends a request that it must give up beside others by a token
    without a logprob (NaN); TGI's router would pass that on as a success, and one without text.
    """
    logprobs = generation.tokens.logprobs
    if generation.HasField("generated_text") and logprobs and math.isnan(logprobs[-1]):
        return ShardError("the shard gave this request up and goes on with the others; its log says why")
    return generation
