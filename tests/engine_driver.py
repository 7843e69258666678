"""A router in small: gives requests blocks and slots, drives an engine call by call, collects what comes back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from scripted import ScriptedAdapter

from deepseek_tgi.core import FinishReason, Generation, Request, SamplingParams, StepResult, StopRule
from deepseek_tgi.engine.engine import Engine, EngineConfig

WARMUP_TEXT = "_test "


@dataclass
class Collected:
    """Everything reported for one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    @property
    def final(self) -> Any:
        return self.generations[-1].generated_text

    @property
    def done(self) -> bool:
        return bool(self.generations) and self.final is not None

    @property
    def reason(self) -> FinishReason:
        return self.final.finish_reason


class PlenteousMemory:
    """A machine with `available` bytes free, whatever is taken."""

    def __init__(self, available: int = 1 << 30) -> None:
        self.available = available

    def available_bytes(self) -> int:
        return self.available

    def resident_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


def warmup_request(truncate: int, **changes: Any) -> Request:
    """As the router makes them: id 0, no blocks, everything switched on."""
    sampling = SamplingParams(
        temperature=0.9,
        top_k=10,
        top_p=0.9,
        typical_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        watermark=True,
    )
    fields: dict[str, Any] = {
        "id": 0,
        "text": WARMUP_TEXT * truncate,
        "truncate": truncate,
        "sampling": sampling,
        "stop": StopRule(1, ignore_eos=True),
        "prefill_logprobs": True,
        "top_n_tokens": 20,
    }
    return Request(**{**fields, **changes})


class Driver:
    """Owns an engine after warm-up and a free list of blocks; `results` by request id."""

    def __init__(
        self,
        adapter: Any,
        config: EngineConfig | None = None,
        max_prefill: int = 64,
        max_total: int = 256,
        **engine: Any,
    ) -> None:
        self.adapter = adapter
        self.engine = Engine(adapter, config, memory=PlenteousMemory(), **engine)
        result = self.engine.warmup([warmup_request(max_prefill)], None, max_prefill, max_total)
        if isinstance(adapter, ScriptedAdapter):
            adapter.steps.clear()
        self.block_size = adapter.kv_layout.block_size
        self.num_blocks = result.max_supported_total_tokens // self.block_size
        self.free = list(range(1, self.num_blocks))
        random.Random(1).shuffle(self.free)
        self.results: dict[int, Collected] = {}
        self._ids = iter(range(10**9))

    def request(self, text: str, max_new: int = 8, blocks: list[int] | None = None, **changes: Any) -> Request:
        """A request with fresh, shuffled blocks (or the given ones) and the next id."""
        stop = changes.pop("stop", StopRule(max_new, changes.pop("stop_sequences", ())))
        sampling = changes.pop("sampling", SamplingParams())
        truncate = changes.pop("truncate", 1000)
        prompt = len(self.adapter.tokenizer.encode(text, truncate=truncate))
        needed = prompt + stop.max_new_tokens - 1
        count = -(-needed // self.block_size)
        if blocks is None:
            blocks = [self.free.pop() for _ in range(count)]
        slots = tuple(blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(needed))
        request_id = changes.pop("id", None)
        request_id = next(self._ids) if request_id is None else request_id
        fields = {"blocks": tuple(blocks), "slots": slots, **changes}
        return Request(request_id, text, truncate, sampling, stop, **fields)

    def collect(self, result: StepResult) -> StepResult:
        for generation in result.generations:
            found = self.results.setdefault(generation.request_id, Collected())
            assert not found.done, "a request was reported after its end"
            found.generations.append(generation)
            found.ids += generation.tokens.ids
            found.logprobs += generation.tokens.logprobs
            found.pieces += generation.tokens.texts
        return result

    def prefill(self, batch_id: int, *requests: Request, cached: Any = None) -> StepResult:
        return self.collect(self.engine.prefill(batch_id, list(requests), cached))

    def decode(self, *batch_ids: int) -> StepResult:
        return self.collect(self.engine.decode(list(batch_ids)))

    def finish(self, batch: Any) -> None:
        """Decode until nothing is left."""
        while batch is not None:
            batch = self.decode(batch.id).batch

    def run(self, *requests: Request) -> list[Collected]:
        """All of them in one batch, to their ends."""
        self.finish(self.prefill(requests[0].id, *requests).batch)
        return [self.results[r.id] for r in requests]
