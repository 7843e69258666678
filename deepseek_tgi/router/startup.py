"""From two sockets to known limits: the conversation a router has with its shards before it serves.

Order and checks are TGI's: ClearCache, Info, Warmup; each check that fails ends the process with its reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from deepseek_tgi.errors import ConfigError, DeepseekTgiError, GenerationError, ResourceError
from deepseek_tgi.pb import control_pb2
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.errors import ShardError

logger = logging.getLogger(__name__)

WARMUP_IMAGE = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00\xff\xd9"
"""An empty JPEG: image models measure with one, text models ignore it."""

WARMUP_ERRORS: dict[str, type[DeepseekTgiError]] = {kind.grpc_code: kind for kind in (ConfigError, ResourceError)}
"""What a warm-up means that the shard refuses, by its status: the process ends with that error's exit code."""


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What the shard is, and the token limits agreed on at start."""

    block_size: int
    speculate: int
    support_chunking: bool
    prefix_caching: bool
    requires_padding: bool
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int

    @property
    def num_blocks(self) -> int:
        """KV blocks there are, block 0 included."""
        return self.max_batch_total_tokens // self.block_size


async def introduce(shards: ShardClient, config: RouterConfig) -> ShardFacts:
    """Clear, ask, warm up, check.

    Raises: `ConfigError` for limits that do not fit together, `ResourceError` if the shard lacks the memory for them,
    `GenerationError` if it fails otherwise.
    """
    _check_config(config)
    await shards.clear_cache()
    info = await shards.info()
    if info.block_size < 1:
        raise ConfigError(f"the shard reports block_size {info.block_size}; expected at least 1")
    if info.HasField("window_size"):
        logger.warning("the shard reports window_size %d; blocks are reserved as without it", info.window_size)
    logger.info("Warming up model")
    try:
        limits = await shards.warmup(warmup_request(config))
    except ShardError as error:
        raise WARMUP_ERRORS.get(error.code, GenerationError)(f"warm-up failed: {error.detail}") from error
    facts = _facts(config, info, limits)
    _check_facts(facts)
    logger.info(
        "Setting max batch total tokens to %d, max total tokens to %d, max input tokens to %d",
        *(facts.max_batch_total_tokens, facts.max_total_tokens, facts.max_input_tokens),
    )
    return facts


def facts_of(config: RouterConfig, loaded: control_pb2.LoadedModel) -> ShardFacts:
    """What a model that was loaded later comes to. Raises as `introduce` does."""
    info = pb.InfoResponse(
        dtype=loaded.dtype,
        device_type=loaded.device_type,
        block_size=loaded.block_size,
        support_chunking=loaded.support_chunking,
        use_prefix_caching=loaded.use_prefix_caching,
    )
    limits = pb.WarmupResponse(
        max_supported_total_tokens=loaded.max_supported_total_tokens,
        max_input_tokens=loaded.max_input_tokens,
        max_total_tokens=loaded.max_total_tokens,
    )
    facts = _facts(config, info, limits)
    _check_facts(facts)
    return facts


def warmup_request(config: RouterConfig) -> pb.WarmupRequest:
    """The largest prefill this configuration allows, cut into requests that all have id 0."""
    requests: list[pb.Request] = []
    missing = config.max_batch_prefill_tokens
    while missing > 0 and (config.max_batch_size is None or len(requests) < config.max_batch_size):
        longest = config.max_input_tokens or (config.max_total_tokens or missing + 1) - 1
        truncate = max(1, min(longest, missing))
        requests.append(_warmup_prompt(truncate, config.max_total_tokens, first=not requests))
        missing -= truncate
    return pb.WarmupRequest(
        batch=pb.Batch(id=0, requests=requests, size=len(requests), max_tokens=config.max_input_tokens or 0),
        max_input_tokens=config.max_input_tokens,
        max_prefill_tokens=config.max_batch_prefill_tokens,
        max_total_tokens=config.max_total_tokens,
    )


def _warmup_prompt(truncate: int, max_total_tokens: int | None, first: bool) -> pb.Request:
    text = "_test " * truncate
    chunks = [pb.InputChunk(text=text)]
    if first:
        chunks.append(pb.InputChunk(image=pb.Image(data=WARMUP_IMAGE, mimetype="image/jpeg;base64")))
    return pb.Request(
        id=0,
        inputs=text,
        input_chunks=pb.Input(chunks=chunks),
        truncate=truncate,
        add_special_tokens=True,
        parameters=pb.NextTokenChooserParameters(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            watermark=True,
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=max(1, (max_total_tokens or 0) - truncate), ignore_eos_token=True
        ),
        prefill_logprobs=True,
        top_n_tokens=20,
    )


def _facts(config: RouterConfig, info: pb.InfoResponse, limits: pb.WarmupResponse) -> ShardFacts:
    for name in ("max_input_tokens", "max_total_tokens"):
        asked, got = getattr(config, name), getattr(limits, name)
        if asked is not None and got != asked:
            raise ConfigError(f"Warmup was asked for {name} {asked} and answered {got}; expected the same number")
    if limits.HasField("max_supported_total_tokens"):
        if config.max_batch_total_tokens is not None:
            logger.warning("--max-batch-total-tokens is ignored: the shard measured its own")
        capacity = limits.max_supported_total_tokens
    else:
        capacity = config.max_batch_total_tokens or max(16000, limits.max_total_tokens, config.max_batch_prefill_tokens)
    total = limits.max_total_tokens
    if not info.requires_padding:
        # A request of all blocks but the reserved one still fits; a larger one could never be admitted.
        total = min(total, (capacity // info.block_size - 1) * info.block_size + 1 - info.speculate)
    if total < limits.max_total_tokens:
        logger.warning("max total tokens %d exceeds the KV cache; %d is what fits", limits.max_total_tokens, total)
    return ShardFacts(
        block_size=info.block_size,
        speculate=info.speculate,
        support_chunking=info.support_chunking and not info.requires_padding,
        prefix_caching=info.use_prefix_caching and not info.requires_padding,
        requires_padding=info.requires_padding,
        max_input_tokens=min(limits.max_input_tokens, total - 1),
        max_total_tokens=total,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_batch_total_tokens=capacity,
    )


def _check_config(config: RouterConfig) -> None:
    if config.validation_workers == 0:
        raise ConfigError("`validation_workers` must be > 0")
    if config.max_batch_size == 0:
        raise ConfigError("`max_batch_size` must be > 0")
    given = config.max_input_tokens, config.max_total_tokens
    if given[0] is not None and given[1] is not None and given[0] >= given[1]:
        raise ConfigError(f"`max_input_tokens` must be < `max_total_tokens`. Given: {given[0]} and {given[1]}")


def _check_facts(facts: ShardFacts) -> None:
    prefill, batch = facts.max_batch_prefill_tokens, facts.max_batch_total_tokens
    if facts.max_input_tokens < 1:
        raise ConfigError(f"the shard's KV cache holds {batch} tokens: too few for one prompt token and one new token")
    if not facts.support_chunking and facts.max_input_tokens > prefill:
        raise ConfigError(
            f"`max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: {prefill} and {facts.max_input_tokens}"
        )
    if prefill > batch:
        raise ConfigError(
            f"`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: {prefill} and {batch}"
        )
    if facts.max_total_tokens > batch:
        raise ConfigError(
            f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {facts.max_total_tokens} and {batch}"
        )
