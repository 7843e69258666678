"""How many blocks the cache gets, from measured memory, and which lengths may be promised for them.

Choice: on a CPU the cache takes at most half of what a worst-case step left free, and no more than the full-length
requests it is meant for can use. Prevents: a server that owns the machine because it could. `kv_memory_bytes`
overrides both. Nothing is clamped silently below what the router demands: it would exit, or wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import Request
from deepseek_tgi.engine.config import FIRST_BLOCK, MAX_PROMPT_LOGIT_ROWS, EngineConfig, WarmupResult, blocks_for
from deepseek_tgi.errors import ConfigError, ResourceError
from deepseek_tgi.kv.layout import CacheLayout

ADVICE = (
    "lower --max-batch-prefill-tokens or --max-total-tokens, give more memory, set --kv-memory, "
    "or use --kv-cache-dtype int8"
)
DEFAULT_BATCH_SIZE = 128
"""Requests that may decode together if the router sets no limit: TGI's own default concurrency."""
SAMPLING_COPIES = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What the router asked for, in tokens; None leaves the choice to the shard."""

    max_input_tokens: int | None
    max_prefill_tokens: int
    max_total_tokens: int | None

    def check(self, max_positions: int, chunking: bool) -> None:
        """Raise `ConfigError` for limits that contradict each other or the model."""
        if self.max_prefill_tokens < 1:
            raise ConfigError(f"max_prefill_tokens: got {self.max_prefill_tokens}, expected at least 1")
        total, prompt = self.max_total_tokens, self.max_input_tokens
        if total is not None and not 2 <= total <= max_positions:
            raise ConfigError(
                f"max_total_tokens: got {total}, expected 2 to {max_positions}, the positions the model has"
            )
        if prompt is not None and not 1 <= prompt < (total or max_positions):
            raise ConfigError(
                f"max_input_tokens: got {prompt}, expected 1 to {(total or max_positions) - 1}, so that one new token "
                "fits behind the longest prompt"
            )
        if prompt is not None and prompt > self.max_prefill_tokens and not chunking:
            raise ConfigError(
                f"max_input_tokens: got {prompt}, expected at most max_prefill_tokens {self.max_prefill_tokens}: "
                "longer prompts need PREFILL_CHUNKING, which is off"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """Outcome of warm-up."""

    num_blocks: int
    result: WarmupResult


def _own(number: int) -> int:
    return number


def plan_cache(
    layout: CacheLayout,
    limits: Limits,
    max_positions: int,
    budget_bytes: int,
    config: EngineConfig,
    *,
    agree: Callable[[int], int] = _own,
) -> Plan:
    """Blocks that fit in `budget_bytes`, and limits that they can keep.

    `agree` turns this rank's number of blocks into all ranks': they have cache of different widths and one block table.
    Raises: `ResourceError` with the needed and the available amounts if the router's demands do not fit: every prompt
    token of a step has a slot, and the longest request fits beside block 0.
    """
    size = layout.block_size
    demanded = limits.max_total_tokens or (limits.max_input_tokens or 0) + 1
    longest = limits.max_total_tokens or max_positions
    needed = max(blocks_for(limits.max_prefill_tokens, size), FIRST_BLOCK + blocks_for(demanded, size))
    if not config.kv_memory_bytes:
        concurrency = min(config.kv_full_requests, config.max_batch_size or config.kv_full_requests)
        useful = max(needed, FIRST_BLOCK + concurrency * blocks_for(longest, size))
        budget_bytes = min(budget_bytes, useful * layout.bytes_per_block)
    num_blocks = agree(layout.num_blocks_in(budget_bytes))
    if num_blocks < needed:
        raise ResourceError(
            f"KV cache: needs {needed} blocks of {layout.bytes_per_block} bytes ({needed * layout.bytes_per_block} "
            f"bytes) for max_prefill_tokens {limits.max_prefill_tokens} and requests of {demanded} tokens; "
            f"{max(0, budget_bytes)} bytes are available ({num_blocks} blocks): {ADVICE}"
        )
    total = limits.max_total_tokens or max(demanded, min(max_positions, (num_blocks - FIRST_BLOCK) * size))
    longest_prompt = total - 1 if config.prefill_chunking else min(total - 1, limits.max_prefill_tokens)
    prompt = limits.max_input_tokens if limits.max_input_tokens is not None else longest_prompt
    return Plan(num_blocks, WarmupResult(num_blocks * size, prompt, total))


def worst_case(requests: Sequence[Request], max_positions: int) -> list[Request]:
    """The router's warm-up requests as one measured step and one more: ids of their own, two new tokens each."""
    return [
        replace(
            request,
            id=number,
            truncate=min(request.truncate, max_positions - 1),
            stop=replace(request.stop, max_new_tokens=2, ignore_eos=True),
        )
        for number, request in enumerate(requests)
    ]


def workspace_bytes(adapter: ModelAdapter, limits: Limits, config: EngineConfig) -> int:
    """What a step may take beside weights and cache: the model's own bound, and copies of the logits for sampling."""
    return step_workspace(adapter.workspace_bytes, adapter.info.vocab_size, limits, config)


def step_workspace(bound: Callable[[int, int], int], vocab_size: int, limits: Limits, config: EngineConfig) -> int:
    """As `workspace_bytes`, of a model that may not be loaded: `bound(tokens, logit rows)` is its own."""
    rows = max(config.max_batch_size or DEFAULT_BATCH_SIZE, MAX_PROMPT_LOGIT_ROWS if config.request_logprobs else 1)
    return bound(limits.max_prefill_tokens, rows) + SAMPLING_COPIES * rows * vocab_size * 4


def cache_budget(available_bytes: int, workspace_bytes: int, config: EngineConfig) -> int:
    """Bytes the cache may take of `available_bytes`, which were free with the weights loaded and no cache.

    Raises: `ResourceError` if the memory that was asked for by size is not there, or a step alone does not fit.
    """
    left = available_bytes - workspace_bytes
    if left <= 0:
        raise ResourceError(
            f"memory: a worst-case step needs {workspace_bytes} bytes beside the weights, "
            f"{max(0, available_bytes)} are available: {ADVICE}"
        )
    if not config.kv_memory_bytes:
        return int(left * config.kv_memory_fraction)
    if config.kv_memory_bytes > left:
        raise ResourceError(
            f"KV cache: {config.kv_memory_bytes} bytes were asked for; {left} are available beside the weights and "
            f"{workspace_bytes} bytes of workspace: lower --kv-memory or leave it out to measure"
        )
    return config.kv_memory_bytes
