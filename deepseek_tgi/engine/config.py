"""What the engine is told at its start, and what it tells about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

Counter = Callable[[str, int], None]
"""Called with an event's name and how often it happened; names are listed in `EVENTS`."""

EVENTS = {
    "prefix_tokens_reused": "prompt tokens whose cache entries were verified and not computed again",
    "prefix_tokens_rejected": "prompt tokens that were claimed to be cached and were not",
    "requests_failed": "requests that were ended because they could not be run or sampled",
}

FIRST_BLOCK = 1
"""Block 0 belongs to the liveness request."""
MAX_PROMPT_LOGIT_ROWS = 256
"""Prompt tokens scored in one step: logits of a whole prompt at once would take gigabytes."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` slots take."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every field has the value that works on a plain machine.

    `kv_memory_bytes` None or 0 means: measure, and take at most `kv_memory_fraction` of what is left after a worst-case
    step, and no more than `kv_full_requests` requests of full length can use (fewer with a smaller `max_batch_size`).
    `request_logprobs` admits prompt logprobs; `prefill_chunking` and `use_prefix_caching` are what the router is told:
    the engine can do both in any case. `rank`/`world_size` decide who reports a request.
    """

    request_logprobs: bool = False
    prefill_chunking: bool = True
    use_prefix_caching: bool = True
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float = 0.5
    kv_full_requests: int = 16
    max_batch_size: int | None = None
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    rank: int = 0
    world_size: int = 1

    def on_gpu(self) -> EngineConfig:
        """The same where the memory is a GPU's, which is the shard's own: the cache takes all but a little of it."""
        return replace(self, kv_memory_fraction=0.95, kv_full_requests=1 << 20)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What `Info` reports; constant over the engine's life."""

    dtype: str
    device_type: str
    attention_impl: str
    block_size: int
    use_prefix_caching: bool
    requires_padding: bool = False
    speculate: int = 0
    support_chunking: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What decides whether one model may take another's place, and what it takes of the machine. Bytes are held now."""

    quantization: str
    vocab_size: int
    tokenizer_size: int
    eos_token_ids: frozenset[int]
    max_positions: int
    weight_bytes: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Limits in tokens that the memory allows; the largest is the cache's capacity, block 0 included."""

    max_supported_total_tokens: int
    max_input_tokens: int
    max_total_tokens: int


def ignore(name: str, count: int) -> None:
    """The counter of an engine nobody watches."""
