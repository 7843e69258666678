"""One request inside the router: what it asks, where its answers go, and the blocks it holds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.blocks import Allocation

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

Delivery: TypeAlias = pb.Generation | DeepseekTgiError


class Mailbox:
    """Generations on their way from the scheduler to the one task that reads them. Costs one put a step."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Delivery) -> None:
        """Append and wake the reader."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def take(self) -> Delivery:
        """The next item; waits until there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def take_nowait(self) -> Delivery | None:
        """The next item if there is one."""
        return self._items.popleft() if self._items else None


@dataclass(frozen=True, slots=True, repr=False)
class Job:
    """What the shard is asked for, checked and tokenised: one entry is made of it, or several (long generations)."""

    text: str
    input_ids: list[int]
    truncate: int
    parameters: pb.NextTokenChooserParameters
    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    add_special_tokens: bool = True
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    adapter_id: str | None = None


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """Owner of one request's blocks from admission to `release`; the scheduler alone changes it."""

    id: int
    job: Job
    mailbox: Mailbox = field(default_factory=Mailbox)
    allocation: Allocation | None = None
    admitted_at: float = 0.0
    prefilled: bool = False
    cancelled: bool = False
    on_cancel: Callable[[Entry], None] | None = None
    trace: SpanContext | None = None

    def cancel(self) -> None:
        """The client is gone: nothing more is wanted. The scheduler drops the entry within one step."""
        if not self.cancelled:
            self.cancelled = True
            if self.on_cancel is not None:
                self.on_cancel(self)

    def message(self, cache_len: int, chunk_len: int | None) -> pb.Request:
        """The wire form; `chunk_len` only for the one request that a prefill cuts."""
        job = self.job
        blocks = self.allocation
        return pb.Request(
            id=self.id,
            inputs=job.text,
            input_chunks=pb.Input(chunks=[pb.InputChunk(text=job.text)]),
            truncate=job.truncate,
            parameters=job.parameters,
            stopping_parameters=pb.StoppingCriteriaParameters(
                max_new_tokens=job.max_new_tokens, stop_sequences=job.stop_sequences
            ),
            prefill_logprobs=job.prefill_logprobs,
            top_n_tokens=job.top_n_tokens,
            blocks=blocks.blocks if blocks else (),
            slots=blocks.slots if blocks else (),
            adapter_id=job.adapter_id,
            cache_len=cache_len,
            add_special_tokens=job.add_special_tokens,
            chunk_len=chunk_len,
        )
