"""Messages to nouns: every field arrives, hostile values are refused by field and value, answers are whole."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deepseek_tgi.core import (
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    GrammarType,
    StepResult,
    StepTimings,
    Tokens,
)
from deepseek_tgi.errors import GenerationError, RequestError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.server import convert

PARAMETERS: dict[str, Any] = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.25, "typical_p": 0.75, "do_sample": True, "seed": 2**64 - 1,
    "repetition_penalty": 1.5, "frequency_penalty": -0.5, "watermark": True, "grammar": "a+",
}  # fmt: skip
TIMINGS = StepTimings(forward_ns=3, decode_ns=2, total_ns=5, concat_ns=1)


def message(**changes: Any) -> pb.Request:
    fields: dict[str, Any] = {
        "id": 2**64 - 2,
        "inputs": "hello",
        "truncate": 9,
        "parameters": pb.NextTokenChooserParameters(
            **{**PARAMETERS, "grammar_type": pb.GRAMMAR_TYPE_REGEX, **changes.pop("parameters", {})}
        ),
        "stopping_parameters": pb.StoppingCriteriaParameters(
            **{"max_new_tokens": 4, "stop_sequences": ["a", "b"], "ignore_eos_token": True, **changes.pop("stop", {})}
        ),
        "prefill_logprobs": True,
        "top_n_tokens": 3,
        "blocks": [4, 2],
        "slots": [64, 65, 32],
        "cache_len": 16,
        "add_special_tokens": True,
        "adapter_id": "lora",
        "chunk_len": 5,
    }
    return pb.Request(**{**fields, **changes})


def test_every_field_arrives() -> None:
    got = convert.request_of(message())
    assert (got.id, got.text, got.truncate, got.cache_len, got.chunk_len) == (2**64 - 2, "hello", 9, 16, 5)
    assert (got.blocks, got.slots, got.adapter_id, got.top_n_tokens) == ((4, 2), (64, 65, 32), "lora", 3)
    assert got.prefill_logprobs
    assert got.add_special_tokens
    assert {name: getattr(got.sampling, name) for name in PARAMETERS} == PARAMETERS
    assert got.sampling.grammar_type is GrammarType.REGEX
    assert (got.stop.max_new_tokens, got.stop.stop_sequences, got.stop.ignore_eos) == (4, ("a", "b"), True)


def test_absent_optionals_stay_absent() -> None:
    given = message()
    given.ClearField("adapter_id")
    given.ClearField("chunk_len")
    got = convert.request_of(given)
    assert got.adapter_id is None
    assert got.chunk_len is None


def test_text_chunks_win_over_inputs_and_images_are_left_out() -> None:
    image = pb.InputChunk(image=pb.Image(data=b"\xff\xd8", mimetype="image/jpeg"))
    chunks = pb.Input(chunks=[pb.InputChunk(text="one "), image, pb.InputChunk(text="two")])
    assert convert.text_of(message(input_chunks=chunks, inputs="one ![](data:image/jpeg;base64,xx)two")) == "one two"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"truncate": 0}, "truncate: got 0"),
        ({"chunk_len": 0}, "chunk_len: got 0"),
        ({"stop": {"max_new_tokens": 0}}, "max_new_tokens: got 0"),
        *(
            ({"parameters": {name: value}}, f"parameters.{name}: got ")
            for name in ("temperature", "repetition_penalty", "top_p", "typical_p")
            for value in (0.0, -1.0, math.nan, math.inf, -math.inf)
        ),
        *(({"parameters": {"frequency_penalty": value}}, "frequency_penalty: got ") for value in (math.nan, math.inf)),
        ({"parameters": {"top_p": 1.5}}, "top_p: got 1.5, expected a finite number above 0 and at most 1"),
        ({"parameters": {"grammar_type": 7}}, "grammar_type: got 7, expected one of 0"),
    ],
)
def test_hostile_values_are_refused_by_field_and_value(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        convert.request_of(message(**changes))
    assert named in str(caught.value)
    assert f"request {2**64 - 2}" in str(caught.value)


def test_a_batch_needs_requests_with_ids_of_their_own() -> None:
    with pytest.raises(RequestError, match="batch 3: requests is empty"):
        convert.requests_of(pb.Batch(id=3))
    with pytest.raises(RequestError, match=r"\[5, 5\] are not distinct"):
        convert.requests_of(pb.Batch(requests=[message(id=5), message(id=5)]))
    assert len(convert.requests_of(pb.Batch(requests=[message(id=0), message(id=0)]), same_ids=True)) == 2


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (pb.PrefillRequest(batch=pb.Batch(id=0)), [0]),
        (pb.PrefillRequest(batch=pb.Batch(id=4), cached_batch=pb.CachedBatch(id=0)), [4, 0]),
        (pb.DecodeRequest(batches=[pb.CachedBatch(id=0), pb.CachedBatch(id=9)]), [0, 9]),
        (pb.FilterBatchRequest(batch_id=1), []),
        (pb.HealthRequest(), []),
    ],
)
def test_a_call_names_the_batches_it_consumes(call: object, named: list[int]) -> None:
    assert convert.named_batches(call) == named


def result(prefill: Tokens | None = None) -> StepResult:
    tokens = Tokens([7, 8], [-0.5, math.nan], ["a", ""], [False, True])
    text = GeneratedText("done", 2, FinishReason.STOP_SEQUENCE, seed=0)
    generation = Generation(0, tokens, prefill, [Tokens([1], [-1.0], ["x"], [False])], text)
    return StepResult([generation], CachedBatch(0, (0, 3), 64, 2), TIMINGS)


@pytest.mark.parametrize("to_pb", [convert.prefill_pb, convert.decode_pb])
def test_an_answer_carries_all_of_a_step(to_pb: Any) -> None:
    got = to_pb(result())
    (generation,) = got.generations
    assert (list(generation.tokens.ids), list(generation.tokens.texts)) == ([7, 8], ["a", ""])
    assert generation.tokens.logprobs[0] == -0.5
    assert math.isnan(generation.tokens.logprobs[1])
    assert list(generation.tokens.is_special) == [False, True]
    assert list(generation.top_tokens[0].ids) == [1]
    assert generation.generated_text.finish_reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert generation.generated_text.HasField("seed")  # a seed of 0 is a seed
    assert not generation.HasField("prefill_tokens")
    assert (got.batch.id, list(got.batch.request_ids), got.batch.size) == (0, [0, 3], 2)
    assert (got.batch.max_tokens, got.batch.current_tokens) == (64, 2)
    assert (got.forward_ns, got.decode_ns, got.total_ns, got.concat_ns) == (3, 2, 5, 1)


def test_no_batch_means_no_field() -> None:
    assert not convert.decode_pb(StepResult([], None, TIMINGS)).HasField("batch")


def test_an_answer_the_router_could_not_read_is_an_error_that_says_so() -> None:
    many = 400_000
    prompt = Tokens(list(range(many)), [-1.0] * many, ["word"] * many, [])
    with pytest.raises(GenerationError, match=r"reads at most 4194304.*400000 prompt tokens"):
        convert.prefill_pb(result(prompt))
