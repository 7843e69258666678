"""TGI's own routes: validation texts and their order, sampling defaults, details, long generations."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_script import Running, Traits
from fake_shard import FakeShard
from router_bench import Bench, router_bench

from deepseek_tgi.pb import generate_pb2 as pb

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 511. Given: 0"),
    ({"truncate": 512}, "`truncate` must be strictly positive and less than 511. Given: 512"),
    (
        {"max_new_tokens": 600},
        "`inputs` tokens + `max_new_tokens` must be <= 512. Given: 2 `inputs` tokens and 600 `max_new_tokens`",
    ),
    ({"grammar": {"type": "regex", "value": "[a"}}, "grammar is not valid: "),
    (
        {"grammar": {"type": "json", "value": {"type": "object"}}},
        "grammar is not valid: Grammar must have a 'properties'",
    ),
    ({"grammar": {"type": "json", "value": "{"}}, "grammar is not valid: "),
    ({"grammar": {"type": "json", "value": '{"properties":{"a":{"const":"\\ud800"}}}'}}, "grammar is not valid: "),
    (
        {"grammar": {"type": "json", "value": '{"properties":' + '{"a":' * 1000 + "1" + "}" * 1001}},
        "grammar is not valid: the schema nests too deeply",
    ),
    (
        {"grammar": {"type": "json", "value": {"properties": {"a": {"$ref": "#/nowhere"}}}}},
        "cannot compile regex from schema: ",
    ),
]
"""Each breaks one rule, in the order of the rules."""


async def refusal(bench: Bench, inputs: str, parameters: dict[str, Any]) -> str:
    """The rule's text, the same from the whole answer and from the stream."""
    body = {"inputs": inputs, "parameters": parameters}
    answer = await bench.post("/generate", body)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation"), answer.text
    text: str = answer.json()["error"]
    if parameters.get("best_of", 1) == 1 and not parameters.get("decoder_input_details"):
        streamed = await bench.json_events("/generate_stream", body)
        assert streamed == [{"error": text, "error_type": "validation"}]
    assert text.startswith("Input validation error: ")
    return text.removeprefix("Input validation error: ")


async def test_line_57_every_rule_has_its_text(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        for parameters, text in REFUSED:
            assert (await refusal(bench, "hello", parameters)).startswith(text), parameters
        assert await refusal(bench, "", {}) == "`inputs` cannot be empty"
        assert await refusal(bench, "x" * 511, {"max_new_tokens": 1}) == (
            "`inputs` tokens + `max_new_tokens` must be <= 512. Given: 512 `inputs` tokens and 1 `max_new_tokens`"
        )
        assert await refusal(bench, "x" * 511, {}) == "`inputs` must have less than 511 tokens. Given: 512"


async def test_line_57_the_first_broken_rule_speaks(tmp_path: Path) -> None:
    combined = [(p, t) for p, t in REFUSED if "best_of" not in p and not {"grammar", "truncate"} & p.keys()]
    async with router_bench(tmp_path) as bench:
        for (first, text), (second, _) in pairwise(combined):
            if not first.keys() & second.keys():
                assert (await refusal(bench, "hello", {**second, **first})).startswith(text)


async def test_line_57_candidates_and_streams_have_rules_of_their_own(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        assert (
            await refusal(bench, "a", {"best_of": 3, "do_sample": True}) == "`best_of` must be > 0 and <= 2. Given: 3"
        )
        best = await bench.json_events("/generate_stream", {"inputs": "a", "parameters": {"best_of": 2}})
        none = await bench.json_events("/generate_stream", {"inputs": "a", "parameters": {"best_of": 0}})
        details = {"inputs": "a", "parameters": {"decoder_input_details": True}}
        prompt = await bench.json_events("/generate_stream", details)
    assert best[0]["error"].endswith("`best_of` != 1 is not supported when streaming tokens")
    assert none == best
    assert prompt[0]["error"].endswith("`decoder_input_details` == true is not supported when streaming tokens")


async def test_line_57_one_candidate_only_and_no_grammars(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-best-of", "1", "--disable-grammar-support"]) as bench:
        one = await refusal(bench, "a", {"best_of": 2, "do_sample": True})
        grammar = await refusal(bench, "a", {"grammar": {"type": "regex", "value": "a+"}})
    assert one == "`best_of` != 1 is not allowed for this endpoint"
    assert grammar == "grammar is not supported"


async def test_line_58_sampling_is_on_only_without_parameters(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        await bench.post("/generate", {"inputs": "say[x]"})
        await bench.post("/generate", {"inputs": "say[x]", "parameters": {}})
        sampled, greedy = bench.shard.requests
    assert (sampled.parameters.do_sample, greedy.parameters.do_sample) == (True, False)
    neutral = greedy.parameters
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.typical_p) == (1.0, 0, 1.0, 1.0)
    assert (neutral.repetition_penalty, neutral.frequency_penalty, neutral.watermark) == (1.0, 0.0, False)


async def test_line_58_root_answers_a_list_with_the_full_text(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        parameters = {"max_new_tokens": 1}
        root = (await bench.post("/", {"inputs": "hi ", "parameters": parameters})).json()
        short = (
            await bench.post("/", {"inputs": "hi ", "parameters": {**parameters, "return_full_text": False}})
        ).json()
        named = (await bench.post("/generate", {"inputs": "hi ", "parameters": parameters})).json()
        streamed = await bench.json_events("/", {"inputs": "hi ", "parameters": parameters, "stream": True})
    assert root == [{"generated_text": "hi w0 "}]
    assert short == [{"generated_text": "w0 "}]
    assert named == {"generated_text": "w0 "}
    assert streamed[-1]["generated_text"] == "hi w0 "


async def test_details_of_a_whole_answer(tmp_path: Path) -> None:
    parameters = {"max_new_tokens": 2, "decoder_input_details": True, "top_n_tokens": 2, "do_sample": True, "seed": 7}
    async with router_bench(tmp_path) as bench:
        details = (await bench.post("/generate", {"inputs": "th", "parameters": parameters})).json()["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 2, 7)
    assert details["prefill"] == [
        {"id": 272, "text": "<s>", "logprob": None},
        {"id": 256, "text": "th", "logprob": -1.5},
    ]
    assert [[t["id"] for t in tops] for tops in details["top_tokens"]] == [[100, 101], [101, 102]]


async def test_best_of_returns_the_loser_too(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        parameters = {"best_of": 2, "do_sample": True, "max_new_tokens": 2, "details": True}
        body = (await bench.post("/generate", {"inputs": "hello", "parameters": parameters})).json()
        seeds = {request.parameters.seed for request in bench.shard.requests}
    (other,) = body["details"]["best_of_sequences"]
    assert list(other) == ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
    assert {other["seed"], body["details"]["seed"]} == seeds
    assert len(seeds) == 2


async def test_c39_truncation_comes_before_the_length_checks(tmp_path: Path) -> None:
    long = "ab " * 400
    async with router_bench(tmp_path, ["--max-input-tokens", "512", "--max-total-tokens", "600"]) as bench:
        body = {"inputs": long, "parameters": {"truncate": 100, "max_new_tokens": 5, "details": True}}
        answer = await bench.post("/generate", body)
        assert answer.status_code == 200
        assert answer.headers["x-prompt-tokens"] == "100"
        assert (await bench.post("/generate", {**body, "parameters": {"truncate": 512}})).status_code == 200
        for wrong in (0, 513):
            assert "`truncate`" in await refusal(bench, long, {"truncate": wrong})
        events = await bench.json_events("/generate_stream", body)
        assert events[-1]["details"]["input_length"] == 100


async def test_line_68_long_generations_go_on_with_exactly_the_wanted_count(tmp_path: Path) -> None:
    traits = Traits(max_total_tokens=20_000, num_blocks=3000)
    async with router_bench(tmp_path, traits=traits) as bench:
        body = {"inputs": "go", "parameters": {"max_new_tokens": 1500, "details": True, "seed": 5, "do_sample": True}}
        events = await bench.json_events("/generate_stream", body)
        pieces = [(r.stopping_parameters.max_new_tokens, r.parameters.seed) for r in bench.shard.requests]
    assert [event["index"] for event in events] == list(range(1, 1501))
    assert pieces == [(1024, 5), (476, 5)]
    last = events[-1]
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 1500, "seed": 5, "input_length": 3}
    assert last["generated_text"] == "".join(event["token"]["text"] for event in events)
    assert all(event["generated_text"] is None for event in events[:-1])


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces start at 16 tokens, so that many of them fit into a short test."""
    monkeypatch.setattr("deepseek_tgi.router.validation.PIECE_TOKENS", 16)
    monkeypatch.setattr("deepseek_tgi.router.infer.PIECE_TOKENS", 16)


@pytest.mark.usefixtures("short_pieces")
async def test_line_68_a_limit_in_the_middle_ends_with_length(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        body = {"inputs": "go", "parameters": {"max_new_tokens": 100_000, "details": True}}
        events = await bench.json_events("/generate_stream", body)
    details = events[-1]["details"]
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == len(events) > 16


@pytest.mark.usefixtures("short_pieces")
async def test_line_68_pieces_grow_so_that_retokenising_stays_linear(tmp_path: Path) -> None:
    async with router_bench(tmp_path, traits=Traits(max_total_tokens=4000)) as bench:
        body = {"inputs": "go", "parameters": {"max_new_tokens": 200}}
        assert (await bench.post("/generate", body)).headers["x-generated-tokens"] == "200"
        pieces = [r.stopping_parameters.max_new_tokens for r in bench.shard.requests]
    assert pieces == [16, 16, 32, 64, 72]


@pytest.mark.usefixtures("short_pieces")
async def test_line_68_a_character_cut_by_a_piece_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeShard._generation

    def cut(shard: FakeShard, running: Running) -> pb.Generation:
        found = real(shard, running)
        if found.HasField("generated_text"):
            found.generated_text.text += "\ufffd"
        return found

    monkeypatch.setattr(FakeShard, "_generation", cut)
    async with router_bench(tmp_path) as bench:
        body = {"inputs": "go ", "parameters": {"max_new_tokens": 20}}
        text = (await bench.post("/generate", body)).json()["generated_text"]
        prompts = [request.inputs for request in bench.shard.requests]
    first = "".join(f"w{i} " for i in range(16))
    assert prompts == ["go ", "go " + first]
    assert text == first + "w0 w1 w2 w3 \ufffd", "at the very end it is shown"


async def test_grammars_reach_the_shard_as_they_are(tmp_path: Path) -> None:
    schema = {"properties": {"b": {"type": "integer"}}, "type": "object", "additionalProperties": False}
    asked = [
        {"type": "json", "value": schema},
        {"type": "json_schema", "value": {"name": "x", "schema": schema}},
        {"type": "regex", "value": "a+"},
    ]
    async with router_bench(tmp_path) as bench:
        for grammar in asked:
            await bench.post("/generate", {"inputs": "say[x]", "parameters": {"grammar": grammar}})
        sent = [(r.parameters.grammar, r.parameters.grammar_type) for r in bench.shard.requests]
    text = '{"properties": {"b": {"type": "integer"}}, "type": "object", "additionalProperties": false}'
    assert sent == [(text, 1), (text, 1), ("a+", 2)]


async def test_a_request_carries_what_the_contract_lists(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        parameters = {"max_new_tokens": 3, "adapter_id": "x", "stop": ["w1 "], "top_k": 4, "details": True}
        answer = (await bench.post("/generate", {"inputs": "hello", "parameters": parameters})).json()
        (request,) = bench.shard.requests
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert (request.id, request.inputs, request.truncate) == (0, "hello", 511)
    assert [c.WhichOneof("chunk") for c in request.input_chunks.chunks] == ["text"]
    assert (request.add_special_tokens, request.cache_len, request.HasField("chunk_len")) == (True, 0, False)
    assert (request.adapter_id, list(request.stopping_parameters.stop_sequences)) == ("x", ["w1 "])
    assert not request.stopping_parameters.ignore_eos_token
    assert len(request.slots) == 2 + 3 - 1
