"""OpenAI routes: shapes, streams, templates, usage, tools, finish reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from router_bench import Bench, router_bench

USER = {"role": "user", "content": "hello"}


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


async def test_line_62_a_completion(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--served-model-id", "m"]) as bench:
        body = (await bench.post("/v1/completions", {"prompt": "say[a|b]", "max_tokens": 9})).json()
        (request,) = bench.shard.requests
    assert list(body) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert (body["object"], body["id"], body["model"]) == ("text_completion", "", "m")
    assert body["system_fingerprint"].endswith("-native")
    assert body["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    assert request.prefill_logprobs
    assert request.add_special_tokens


async def test_line_62_lists_of_prompts(tmp_path: Path) -> None:
    long = "abcdefghijklmnopqrst"
    async with router_bench(tmp_path) as bench:
        prompts = [f"say[{'|'.join(long)}]", "say[x]", "say[p|q]"]
        answer = await bench.post("/v1/completions", {"prompt": prompts, "max_tokens": 99})
        body = answer.json()
        lengths = [len(bench.shard.tokenizer.encode(prompt).ids) for prompt in prompts]
    assert sorted((c["index"], c["text"]) for c in body["choices"]) == [(0, long), (1, "x"), (2, "pq")]
    assert body["choices"][-1]["index"] == 0, "in order of completion"
    counts = sum(lengths), 21 + 2 + 3
    assert body["usage"] == {
        "prompt_tokens": counts[0],
        "completion_tokens": counts[1],
        "total_tokens": sum(counts),
    }
    assert (answer.headers["x-prompt-tokens"], answer.headers["x-generated-tokens"]) == tuple(map(str, counts))


async def test_line_62_a_completion_stream(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        raw = await bench.events("/v1/completions", {"prompt": ["say[a]", "say[x|y]"], "max_tokens": 9, "stream": True})
    assert raw[-1] == "[DONE]"
    events = [json.loads(text) for text in raw[:-1]]
    for index, text in ((0, ["a", "</s>"]), (1, ["x", "y", "</s>"])):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        assert [event["choices"][0]["text"] for event in mine] == text
        assert [event["choices"][0]["finish_reason"] for event in mine] == [""] * (len(text) - 1) + ["eos_token"]
        assert list(mine[0]) == ["object", "id", "created", "choices", "model", "system_fingerprint"]
        assert mine[-1]["usage"]["completion_tokens"] == len(text)


async def test_line_62_refusals(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        suffix = await bench.post("/v1/completions", {"prompt": "a", "suffix": "b"})
        many = await bench.post("/v1/completions", {"prompt": ["a"] * 5})
        empty = await bench.post("/v1/completions", {"prompt": []})
        error = await bench.events("/v1/completions", {"prompt": "a", "max_tokens": 0, "stream": True})
    assert (suffix.status_code, suffix.json()["error_type"]) == (422, "suffix not supported")
    assert suffix.json()["error"] == "Suffix is not supported and can be achieved by preprocessing the prompt."
    assert (many.status_code, many.json()) == (
        422,
        {
            "error": "Number of prompts exceeds the maximum allowed batch size of 4",
            "error_type": "batch size exceeded",
        },
    )
    assert empty.status_code == 422
    assert empty.text.startswith("Failed to deserialize the JSON body into the target type: prompt: ")
    message = "Input validation error: `max_new_tokens` must be strictly positive"
    assert json.loads(error[0]) == {"error": {"message": message, "http_status_code": 422}}
    assert error[1:] == ["[DONE]"]


async def test_line_63_a_chat(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--served-model-id", "m"]) as bench:
        body = (
            await bench.post("/v1/chat/completions", chat("say[a|b]", model="tgi", logprobs=True, top_logprobs=2))
        ).json()
        named = (await bench.post("/v1/chat/completions", chat("say[a]", model="other"))).json()
        request, other = bench.shard.requests
    assert list(body) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "ab"}
    assert choice["finish_reason"] == "stop"
    first = choice["logprobs"]["content"][0]
    assert first == {
        "token": "a",
        "logprob": -0.41210938,
        "top_logprobs": [{"token": "w0 ", "logprob": -0.41210938}, {"token": "w1 ", "logprob": -1.4121094}],
    }
    assert (body["model"], named["model"]) == ("m", "other")
    assert (request.HasField("adapter_id"), other.adapter_id) == (False, "other")
    assert not request.add_special_tokens
    assert named["choices"][0]["logprobs"] is None


async def test_line_63_parameters_map_as_tgi_maps_them(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        await bench.post("/v1/chat/completions", chat("say[x]", presence_penalty=0.5, temperature=0))
        await bench.post(
            "/v1/chat/completions", chat("say[x]", temperature=0.5, top_p=0.5, seed=3, max_completion_tokens=7)
        )
        await bench.post("/v1/chat/completions", chat("say[x]"))
        greedy, sampled, plain = [request.parameters for request in bench.shard.requests]
        lengths = [request.stopping_parameters.max_new_tokens for request in bench.shard.requests]
        both = await bench.post("/v1/chat/completions", chat(max_tokens=1, max_completion_tokens=1))
    assert (greedy.do_sample, greedy.temperature, greedy.repetition_penalty) == (False, 1.0, 2.5)
    assert (sampled.do_sample, sampled.temperature, sampled.top_p, sampled.seed) == (True, 0.5, 0.5, 3)
    assert (plain.do_sample, plain.temperature) == (True, 1.0)
    assert lengths[1] == 7
    assert (both.status_code, "duplicate field `max_tokens`" in both.text) == (422, True)


async def test_line_63_a_chat_stream(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--served-model-id", "m"]) as bench:
        raw = await bench.events("/v1/chat/completions", chat("say[é|b]", stream=True))
    assert raw[-1] == "[DONE]"
    events = [json.loads(text) for text in raw[:-1]]
    assert list(events[0]) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": text} for text in ("é", "b", "")]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert [event["usage"] for event in events] == [None] * 3
    assert "é" in raw[0], "text is UTF-8, not escaped"


@pytest.mark.parametrize("wish", [True, False, None])
async def test_c45_usage_comes_in_one_more_chunk_if_asked_for(tmp_path: Path, wish: bool | None) -> None:
    options = {} if wish is None else {"stream_options": {"include_usage": wish}}
    async with router_bench(tmp_path) as bench:
        events = await bench.json_events("/v1/chat/completions", chat("say[a|b]", stream=True, **options))
        whole = (await bench.post("/v1/chat/completions", chat("say[a|b]"))).json()
    counted = [event for event in events if event["usage"] is not None]
    assert len(counted) == (1 if wish else 0)
    if wish:
        assert counted == [events[-1]]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]


async def test_c20_one_bos_on_both_routes(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        usage = (await bench.post("/v1/chat/completions", chat("hello", max_tokens=1))).json()["usage"]
        await bench.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 1}})
        rendered, plain = bench.shard.requests
        encode = bench.shard.tokenizer.encode
    chat_ids = encode(rendered.inputs, add_special_tokens=rendered.add_special_tokens).ids
    plain_ids = encode(plain.inputs, add_special_tokens=plain.add_special_tokens).ids
    assert (chat_ids.count(272), plain_ids.count(272)) == (1, 1)
    assert usage["prompt_tokens"] == len(chat_ids)


async def test_c24_an_assistant_turn_with_tool_calls_needs_no_content(tmp_path: Path) -> None:
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    texts = []
    async with router_bench(tmp_path) as bench:
        for extra in ({}, {"content": None}, {"content": ""}):
            turn = {"role": "assistant", "tool_calls": [call], **extra}
            messages = [USER, turn, {"role": "tool", "tool_call_id": "7", "content": [{"type": "text", "text": "ok"}]}]
            answer = await bench.post("/chat_tokenize", {"messages": messages})
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["templated_text"])
        for wrong in ({"role": "user"}, {"role": "assistant", "content": None}):
            refused = await bench.post("/v1/chat/completions", {"messages": [USER, wrong]})
            assert refused.status_code == 422
            assert "messages[1].content: missing content" in refused.text
    assert len(set(texts)) == 1
    rendered = '[{"id":"7","type":"function","function":{"description":null,"name":"f","arguments":"{\\"a\\":1}"}}]'
    assert rendered in texts[0]
    assert "<|im_start|>tool\nok<|im_end|>" in texts[0]


async def test_line_63_images_and_parts_become_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    async with router_bench(tmp_path) as bench:
        answer = await bench.post("/chat_tokenize", {"messages": [{"role": "user", "content": parts}]})
        wrong = await bench.post("/chat_tokenize", {"messages": [{"role": "user", "content": [{"type": "sound"}]}]})
    assert "see ![](http://x/y.png)<|im_end|>" in answer.json()["templated_text"]
    assert "messages[0].content[0].type: unknown variant `sound`" in wrong.text


async def test_line_63_the_last_assistant_message_is_continued(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        messages = [USER, {"role": "assistant", "content": "Once upon"}]
        text = (await bench.post("/chat_tokenize", {"messages": messages})).json()["templated_text"]
    assert text == "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nOnce upon"


async def test_template_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"chat_template": "{{ raise_exception('no ' + messages[0].role) }}"})
    )
    async with router_bench(tmp_path, ["--tokenizer-config-path", str(tmp_path / "config.json")]) as bench:
        refused = await bench.post("/v1/chat/completions", chat())
    assert (refused.status_code, refused.json()) == (
        422,
        {"error": "Template error: no user", "error_type": "template_error"},
    )


ENDS: list[tuple[str, dict[str, Any], str]] = [
    ("say[a]", {}, "eos_token"),
    ("say[a|b]", {"stop": ["b"]}, "stop_sequence"),
    ("go", {"max_tokens": 2}, "length"),
]


async def reasons(bench: Bench, content: str, fields: dict[str, Any]) -> dict[str, list[str]]:
    """Final reasons by route, stream and not."""
    found: dict[str, list[str]] = {}
    for path, body in (("chat/completions", chat(content)), ("completions", {"prompt": content})):
        whole = (await bench.post(f"/v1/{path}", {**body, **fields})).json()["choices"][0]["finish_reason"]
        events = await bench.json_events(f"/v1/{path}", {**body, **fields, "stream": True})
        streamed = [event["choices"][0]["finish_reason"] for event in events]
        final = [reason for reason in streamed if reason]
        assert len(final) == 1, "each stream has exactly one final reason"
        found[path] = [whole, *final]
    return found


async def test_c42_finish_reasons_are_tgis_by_default(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        for content, fields, native in ENDS:
            word = "stop" if native == "eos_token" else native
            expected = {"chat/completions": [word, word], "completions": [word, native]}
            assert await reasons(bench, content, fields) == expected


async def test_c42_finish_reasons_can_be_openais_only(tmp_path: Path) -> None:
    async with router_bench(tmp_path, environ={"DEEPSEEK_TGI_OPENAI_REASONS": "openai"}) as bench:
        for content, fields, native in ENDS:
            word = "length" if native == "length" else "stop"
            expected = {"chat/completions": [word, word], "completions": [word, word]}
            assert await reasons(bench, content, fields) == expected
            parameters = {"max_new_tokens": fields.get("max_tokens"), "stop": fields.get("stop", []), "details": True}
            body = (await bench.post("/generate", {"inputs": content, "parameters": parameters})).json()
            assert body["details"]["finish_reason"] == native, "native routes keep their own words"


async def test_c46_both_kinds_of_reader_understand_the_stream(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        for path, body in (
            ("/v1/chat/completions", chat("say[a|b]", stream=True)),
            ("/generate_stream", {"inputs": "say[a]"}),
        ):
            raw = (await bench.post(path, body)).content.decode()
            lines = raw.split("\n")
            spaced = [line[len("data: ") :] for line in lines if line.startswith("data: ")]
            lenient = [line.split(":", 1)[1].strip() for line in lines if line.startswith("data:")]
            assert spaced == lenient
            assert lines[1::2] == [""] * (len(lines) // 2), "one line a block, one empty line after it"
