"""A plain model of TGI's batching task: blocks, slots, ids, and what must hold of every answer.

It is driven by hand (`admit`, `step`, `cancel`), so that a test decides what meets what. Each answer of the shard is
checked against the protocol before it is believed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shard_client import ShardClient, neutral_parameters

from deepseek_tgi.pb import generate_pb2 as pb


class BlockBook:
    """The router's free list, dealt out shuffled so that neighbours in a sequence are never neighbours in memory."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._random = random.Random(seed)
        self._free = list(range(1, num_blocks))  # block 0 belongs to the health request
        self.fewest_free = len(self._free)

    @property
    def num_free(self) -> int:
        """Blocks that could be given away now."""
        return len(self._free)

    def take(self, num_tokens: int) -> list[int]:
        """Blocks for `num_tokens`, in no order; the shard must cope."""
        count = -(-num_tokens // self.block_size)
        assert count <= len(self._free), f"the test wants {count} blocks of {len(self._free)} free"
        self._random.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        self.fewest_free = min(self.fewest_free, len(self._free))
        return taken

    def claim(self, blocks: Iterable[int]) -> None:
        """Take exactly these out of the free list, as a prefix hit does."""
        for block in blocks:
            self._free.remove(block)

    def give(self, blocks: Iterable[int]) -> None:
        """Return blocks; the next `take` may deal them out again at once."""
        returned = list(blocks)
        assert not set(returned) & set(self._free), "a block was returned twice"
        self._free.extend(returned)

    def slots(self, blocks: Sequence[int], num_tokens: int) -> list[int]:
        """Slot of each position, cut to exactly `num_tokens`."""
        size = self.block_size
        return [blocks[p // size] * size + p % size for p in range(num_tokens)]


@dataclass
class Ask:
    """What a client wants. `shared` blocks are put in front and stay the caller's; `cache_len` is the claim made."""

    text: str
    max_new: int = 8
    ignore_eos: bool = True
    stops: Sequence[str] = ()
    top_n: int = 0
    prefill_logprobs: bool = False
    add_special: bool = True
    truncate: int = 0
    cache_len: int = 0
    chunk_len: int | None = None
    adapter_id: str | None = None
    shared: Sequence[int] = ()
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one request has yielded so far."""

    prompt_tokens: int
    slots: list[int]
    blocks: list[int]
    own_blocks: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    special: list[bool] = field(default_factory=list)
    top: list[pb.Tokens] = field(default_factory=list)
    prefill: pb.Tokens | None = None
    final: pb.GeneratedText | None = None

    @property
    def text(self) -> str:
        """The final text."""
        assert self.final is not None, "the request has not ended"
        return self.final.text

    @property
    def reason(self) -> str:
        """Name of the finish reason, without its prefix."""
        assert self.final is not None, "the request has not ended"
        return pb.FinishReason.Name(self.final.finish_reason).removeprefix("FINISH_REASON_")


class RouterModel:
    """One batching task over one shard; request and batch ids count up from 0 as the router's do."""

    def __init__(self, client: ShardClient, book: BlockBook, encode: Any, first_id: int = 0) -> None:
        self.client = client
        self.book = book
        self._encode = encode
        self._next_request = first_id
        self._next_batch = first_id
        self.batch: pb.CachedBatch | None = None
        self.outcomes: dict[int, Outcome] = {}
        self.live: set[int] = set()

    def build(self, ask: Ask) -> pb.Request:
        """Give a request an id, blocks and slots; it counts as live from here on."""
        length = len(self._encode(ask.text, ask.add_special))
        length = min(length, ask.truncate) if ask.truncate else length
        need = length + ask.max_new - 1
        own = self.book.take(need - len(ask.shared) * self.book.block_size) if need > 0 else []
        blocks = [*ask.shared, *own]
        slots = self.book.slots(blocks, need)
        number = self._next_request
        self._next_request += 1
        self.outcomes[number] = Outcome(length, slots, blocks, own)
        self.live.add(number)
        return pb.Request(
            id=number,
            inputs=ask.text,
            input_chunks=pb.Input(chunks=[pb.InputChunk(text=ask.text)]),
            truncate=ask.truncate or 4096,
            add_special_tokens=ask.add_special,
            parameters=neutral_parameters(**ask.parameters),
            stopping_parameters=pb.StoppingCriteriaParameters(
                max_new_tokens=ask.max_new, stop_sequences=ask.stops, ignore_eos_token=ask.ignore_eos
            ),
            prefill_logprobs=ask.prefill_logprobs,
            top_n_tokens=ask.top_n,
            blocks=blocks,
            slots=slots,
            cache_len=ask.cache_len,
            chunk_len=ask.chunk_len,
            adapter_id=ask.adapter_id,
        )

    def admit(self, *asks: Ask) -> pb.PrefillResponse:
        """Prefill new requests together with whatever is running."""
        batch_id = self._next_batch
        self._next_batch += 1
        response = self.client.prefill([self.build(a) for a in asks], batch_id, self.batch)
        self._absorb(response)
        return response

    def step(self) -> pb.DecodeResponse:
        """One Decode of what is running."""
        assert self.batch is not None, "nothing is running"
        response = self.client.decode([self.batch])
        self._absorb(response)
        return response

    def cancel(self, *ids: int) -> None:
        """Clients went away: drop their entries, then tell the shard as the router does after a step."""
        for number in ids:
            self._end(number)
        self._reconcile()

    def finish(self, limit: int = 2000) -> None:
        """Decode until nothing is left."""
        for _ in range(limit):
            if self.batch is None:
                assert not self.live, f"requests {self.live} have no batch and no end"
                return
            self.step()
        raise AssertionError(f"still running after {limit} steps: {self.live}")

    def run(self, *asks: Ask) -> list[Outcome]:
        """Admit together, run to the end, and return the outcomes in order."""
        first = self._next_request
        self.admit(*asks)
        self.finish()
        return [self.outcomes[first + i] for i in range(len(asks))]

    def serve(self, asks: Sequence[Ask], budget: int) -> None:
        """The router's own loop with chunking: admit what the prefill budget allows, cut one, decode; to the end."""
        queue = list(asks)
        while queue or self.batch is not None:
            room = budget - (self.batch.current_tokens if self.batch is not None else 0)
            new: list[Ask] = []
            while queue and room > 0:
                postfix = len(self._encode(queue[0].text, queue[0].add_special)) - queue[0].cache_len
                ask = queue.pop(0)
                new.append(ask if postfix <= room else replace(ask, chunk_len=room))
                room -= postfix
            if new:
                self.admit(*new)
            if self.batch is not None:
                self.step()

    def _absorb(self, response: Any) -> None:
        self.batch = response.batch if response.HasField("batch") else None
        seen: set[int] = set()
        for generation in response.generations:
            number = generation.request_id
            assert number in self.live, f"a Generation for {number}, which is unknown or has ended: the router panics"
            assert number not in seen, f"two Generations for {number} in one answer"
            seen.add(number)
            self._collect(self.outcomes[number], generation)
            if generation.HasField("generated_text"):
                self._end(number)
        assert self.batch is not None or not self.live, f"no batch came back, but {self.live} have not ended"
        if self.batch is not None:
            check_cached_batch(self.batch)
            assert self.live <= set(self.batch.request_ids), "a running request is missing from the returned batch"
        self._reconcile()

    def _collect(self, outcome: Outcome, generation: pb.Generation) -> None:
        tokens = generation.tokens
        lengths = {len(tokens.ids), len(tokens.logprobs), len(tokens.texts), len(tokens.is_special)}
        assert len(lengths) == 1, f"lists of unequal length {lengths} in tokens"
        assert lengths != {0}, "a Generation with no token never ends its request"
        if generation.HasField("prefill_tokens") and generation.prefill_tokens.ids:
            assert not outcome.ids, "prompt tokens come with the first Generation only"
            outcome.prefill = generation.prefill_tokens
        outcome.ids.extend(tokens.ids)
        outcome.logprobs.extend(tokens.logprobs)
        outcome.texts.extend(tokens.texts)
        outcome.special.extend(tokens.is_special)
        outcome.top.extend(generation.top_tokens)
        if generation.HasField("generated_text"):
            outcome.final = generation.generated_text
            assert outcome.final.generated_tokens == len(outcome.ids), "count of tokens sent and count told differ"

    def _end(self, number: int) -> None:
        self.live.remove(number)
        self.book.give(self.outcomes[number].own_blocks)

    def _reconcile(self) -> None:
        """What the router does when the returned batch holds more than its entries."""
        if self.batch is None or self.batch.size == len(self.live):
            return
        if not self.live:
            self.client.clear(self.batch.id)
            self.batch = None
            return
        kept = [i for i in self.batch.request_ids if i in self.live]
        answer = self.client.filter(self.batch.id, kept)
        check_cached_batch(answer)
        assert list(answer.request_ids) == kept, "FilterBatch must keep exactly the named requests in that order"
        self.batch = answer


def check_cached_batch(batch: pb.CachedBatch) -> None:
    """What must hold of every handle."""
    assert batch.size == len(batch.request_ids) > 0, batch
    assert len(set(batch.request_ids)) == batch.size, f"an id is listed twice: {batch}"
    assert batch.max_tokens > 0, batch
    assert batch.current_tokens > 0, batch
