"""Messages to nouns and back. What comes in is hostile until checked here; what goes out is ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deepseek_tgi.core import (
    CachedBatch,
    GeneratedText,
    Generation,
    GrammarType,
    Request,
    SamplingParams,
    StepResult,
    StopRule,
    Tokens,
)
from deepseek_tgi.errors import GenerationError, RequestError
from deepseek_tgi.pb import generate_pb2 as pb

MAX_RESPONSE_BYTES = 4 * 1024 * 1024
"""TGI's router decodes at most this much; a larger answer fails the whole batch without a reason."""


def requests_of(batch: pb.Batch, same_ids: bool = False) -> list[Request]:
    """The requests of a batch, in order. Raises `RequestError` naming request, field and value.

    `same_ids` admits equal ids: the router's warmup sends 0 for all.
    """
    if not batch.requests:
        raise RequestError(f"batch {batch.id}: requests is empty, expected at least one")
    requests = [request_of(message) for message in batch.requests]
    if not same_ids and len({request.id for request in requests}) != len(requests):
        raise RequestError(f"batch {batch.id}: request ids {[r.id for r in requests]} are not distinct")
    return requests


def request_of(message: pb.Request) -> Request:
    """One request, checked. Raises `RequestError` naming the field and the value it has."""
    where = f"request {message.id}"
    if message.truncate < 1:
        raise RequestError(f"{where}: truncate: got {message.truncate}, expected at least 1 token")
    if message.HasField("chunk_len") and message.chunk_len < 1:
        raise RequestError(f"{where}: chunk_len: got {message.chunk_len}, expected at least 1 token")
    return Request(
        id=message.id,
        text=text_of(message),
        truncate=message.truncate,
        sampling=_sampling(message, where),
        stop=_stop(message, where),
        add_special_tokens=message.add_special_tokens,
        prefill_logprobs=message.prefill_logprobs,
        top_n_tokens=message.top_n_tokens,
        blocks=tuple(message.blocks),
        slots=tuple(message.slots),
        cache_len=message.cache_len,
        chunk_len=message.chunk_len if message.HasField("chunk_len") else None,
        adapter_id=message.adapter_id if message.HasField("adapter_id") else None,
    )


def text_of(message: pb.Request) -> str:
    """The prompt: its text chunks joined, images left out as text models do; `inputs` where there are no chunks."""
    if not message.input_chunks.chunks:
        return message.inputs
    return "".join(chunk.text for chunk in message.input_chunks.chunks if chunk.WhichOneof("chunk") == "text")


def _sampling(message: pb.Request, where: str) -> SamplingParams:
    if not message.HasField("parameters"):
        return SamplingParams()
    given = message.parameters
    _within(where, "temperature", given.temperature, low=0.0)
    _within(where, "repetition_penalty", given.repetition_penalty, low=0.0)
    _within(where, "top_p", given.top_p, low=0.0, high=1.0)
    _within(where, "typical_p", given.typical_p, low=0.0, high=1.0)
    _within(where, "frequency_penalty", given.frequency_penalty, low=-math.inf)
    if given.grammar_type not in {kind.value for kind in GrammarType}:
        known = ", ".join(f"{kind.value} ({kind.name})" for kind in GrammarType)
        raise RequestError(f"{where}: parameters.grammar_type: got {given.grammar_type}, expected one of {known}")
    return SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        typical_p=given.typical_p,
        do_sample=given.do_sample,
        seed=given.seed,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
        watermark=given.watermark,
        grammar=given.grammar,
        grammar_type=GrammarType(given.grammar_type),
    )


def _within(where: str, name: str, value: float, low: float, high: float = math.inf) -> None:
    """Finite, above `low` and at most `high`."""
    if not (low < value <= high and math.isfinite(value)):
        bounds = "a finite number" if low == -math.inf else f"a finite number above {low:g}"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{where}: parameters.{name}: got {value:g}, expected {bounds}{upper}")


def _stop(message: pb.Request, where: str) -> StopRule:
    given = message.stopping_parameters
    if given.max_new_tokens < 1:
        raise RequestError(
            f"{where}: stopping_parameters.max_new_tokens: got {given.max_new_tokens}, expected at least 1"
        )
    return StopRule(given.max_new_tokens, tuple(s for s in given.stop_sequences if s), given.ignore_eos_token)


def cached_batch_of(message: pb.CachedBatch) -> CachedBatch:
    """The router's name for a batch the shard holds; only `id` is relied upon."""
    return CachedBatch(message.id, tuple(message.request_ids), message.max_tokens, message.current_tokens)


def named_batches(message: object) -> list[int]:
    """Ids of the batches that a call consumes: gone if the call fails, whatever the reason."""
    if isinstance(message, pb.PrefillRequest):
        return [message.batch.id, *([message.cached_batch.id] if message.HasField("cached_batch") else [])]
    if isinstance(message, pb.DecodeRequest):
        return [batch.id for batch in message.batches]
    return []


def cached_batch_pb(batch: CachedBatch) -> pb.CachedBatch:
    """A cached batch for the router."""
    return pb.CachedBatch(
        id=batch.id,
        request_ids=batch.request_ids,
        size=batch.size,
        max_tokens=batch.max_tokens,
        current_tokens=batch.current_tokens,
    )


def prefill_pb(result: StepResult) -> pb.PrefillResponse:
    """Answer of Prefill. Raises `GenerationError` if the router could not read it."""
    response = pb.PrefillResponse(**_step(result))
    _check_size(response.ByteSize(), result)
    return response


def decode_pb(result: StepResult) -> pb.DecodeResponse:
    """Answer of Decode. Raises `GenerationError` if the router could not read it."""
    response = pb.DecodeResponse(**_step(result))
    _check_size(response.ByteSize(), result)
    return response


def _step(result: StepResult) -> dict[str, Any]:
    """The fields that both answers share."""
    return {
        "generations": [_generation(generation) for generation in result.generations],
        "batch": cached_batch_pb(result.batch) if result.batch is not None else None,
        "forward_ns": result.timings.forward_ns,
        "decode_ns": result.timings.decode_ns,
        "total_ns": result.timings.total_ns,
        "concat_ns": result.timings.concat_ns,
    }


def _check_size(size_bytes: int, result: StepResult) -> None:
    if size_bytes > MAX_RESPONSE_BYTES:
        prompts = sum(len(g.prefill_tokens.ids) for g in result.generations if g.prefill_tokens is not None)
        raise GenerationError(
            f"the answer has {size_bytes} bytes and the router reads at most {MAX_RESPONSE_BYTES}; it holds logprobs "
            f"of {prompts} prompt tokens: ask for fewer top tokens, or for prompt details of shorter prompts"
        )


def _generation(generation: Generation) -> pb.Generation:
    return pb.Generation(
        request_id=generation.request_id,
        prefill_tokens=_tokens(generation.prefill_tokens) if generation.prefill_tokens is not None else None,
        tokens=_tokens(generation.tokens),
        generated_text=_text(generation.generated_text) if generation.generated_text is not None else None,
        top_tokens=_all_tokens(generation.top_tokens or ()),
    )


def _all_tokens(many: Sequence[Tokens]) -> list[pb.Tokens]:
    return [_tokens(tokens) for tokens in many]


def _tokens(tokens: Tokens) -> pb.Tokens:
    return pb.Tokens(ids=tokens.ids, logprobs=tokens.logprobs, texts=tokens.texts, is_special=tokens.is_special)


def _text(text: GeneratedText) -> pb.GeneratedText:
    reason = pb.FinishReason.Name(text.finish_reason.value)
    return pb.GeneratedText(
        text=text.text, generated_tokens=text.generated_tokens, finish_reason=reason, seed=text.seed
    )
