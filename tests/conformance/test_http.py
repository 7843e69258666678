"""HTTP of the embedded router: routes, refusals, bytes of streams, headers, permits, health, metrics."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_script import Traits
from router_bench import Bench, router_bench

GENERATE = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETION = {"prompt": "hello", "max_tokens": 2}
NOT_JSON = "Failed to parse the request body as JSON: "
WRONG_SHAPE = "Failed to deserialize the JSON body into the target type: "


async def test_line_56_every_route_answers(tmp_path: Path) -> None:
    posts: dict[str, Any] = {
        "/": GENERATE,
        "/generate": GENERATE,
        "/generate_stream": GENERATE,
        "/v1/completions": COMPLETION,
        "/v1/chat/completions": CHAT,
        "/vertex": {"instances": [{"inputs": "hello", "parameters": {"max_new_tokens": 2}}]},
        "/invocations": GENERATE,
        "/tokenize": {"inputs": "hello"},
        "/chat_tokenize": CHAT,
    }
    gets = ["/", "/health", "/ping", "/info", "/v1/models", "/metrics", "/docs", "/api-doc/openapi.json"]
    async with router_bench(tmp_path) as bench:
        for path, body in posts.items():
            assert (await bench.post(path, body)).status_code == 200, path
        for path in gets:
            assert (await bench.client.get(path)).status_code == 200, path
        document = (await bench.client.get("/api-doc/openapi.json")).json()
        assert set(posts) <= document["paths"].keys()
        assert "://" not in (await bench.client.get("/docs")).text, "the page must need no other host"


async def test_line_56_unknown_paths_and_methods_have_empty_bodies(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        missing = await bench.client.get("/nowhere")
        wrong = await bench.client.get("/generate")
        assert (missing.status_code, missing.content) == (404, b"")
        assert (wrong.status_code, wrong.content) == (405, b"")
        assert (await bench.client.post("/info")).status_code == 405


MALFORMED: list[tuple[bytes, int, str]] = [
    (b"", 400, NOT_JSON + "EOF while parsing a value at line 1 column 0"),
    (b"{", 400, NOT_JSON),
    (b'{"inputs": "a"} x', 400, NOT_JSON),
    (b'{"inputs": NaN}', 400, NOT_JSON),
    (b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 400, NOT_JSON),
    (b'{"inputs": "\xff"}', 400, NOT_JSON),
    (b'{"inputs": "\\ud800"}', 400, NOT_JSON),
    (b'{"inputs": ' + b"[" * 200 + b"]" * 200 + b"}", 400, NOT_JSON + "recursion limit exceeded"),
    (b"[" * 100_000, 400, NOT_JSON + "recursion limit exceeded"),
    (b"[]", 422, WRONG_SHAPE + "invalid type: sequence, expected struct GenerateRequest"),
    (b"{}", 422, WRONG_SHAPE + "missing field `inputs`"),
    (b'{"inputs": 5}', 422, WRONG_SHAPE + "inputs: invalid type: integer `5`, expected a string"),
    (b'{"inputs": "a", "inputs": "b"}', 422, WRONG_SHAPE + "duplicate field `inputs`"),
    (b'{"inputs": "a", "parameters": null}', 422, WRONG_SHAPE + "parameters: invalid type: null"),
    (
        b'{"inputs": "a", "parameters": {"temperature": "hot"}}',
        422,
        WRONG_SHAPE + 'parameters.temperature: invalid type: string "hot", expected f32',
    ),
    (
        b'{"inputs": "a", "parameters": {"max_new_tokens": -1}}',
        422,
        WRONG_SHAPE + "parameters.max_new_tokens: invalid value: integer `-1`, expected u32",
    ),
    (
        b'{"inputs": "a", "parameters": {"max_new_tokens": 1.5}}',
        422,
        WRONG_SHAPE + "parameters.max_new_tokens: invalid type: floating point `1.5`, expected u32",
    ),
    (
        b'{"inputs": "a", "parameters": {"seed": 99999999999999999999999999}}',
        422,
        WRONG_SHAPE + "parameters.seed: invalid type: floating point `1e+26`, expected u64",
    ),
    (b'{"inputs": "a", "parameters": {"temperature": 1e39}}', 422, WRONG_SHAPE + "parameters.temperature: "),
    (
        b'{"inputs": "a", "parameters": {"stop": ["a", 1]}}',
        422,
        WRONG_SHAPE + "parameters.stop[1]: invalid type: integer `1`, expected a string",
    ),
    (
        b'{"inputs": "a", "parameters": {"details": true, "details": false}}',
        422,
        WRONG_SHAPE + "parameters: duplicate field `details`",
    ),
]


async def test_line_56_malformed_bodies_get_one_plain_text(tmp_path: Path) -> None:
    kind = {"content-type": "application/json"}
    async with router_bench(tmp_path) as bench:
        for body, status, text in MALFORMED:
            answer = await bench.client.post("/generate", content=body, headers=kind)
            assert (answer.status_code, answer.text[: len(text)]) == (status, text)
            assert answer.headers["content-type"].startswith("text/plain")


async def test_line_56_unknown_fields_are_ignored(tmp_path: Path) -> None:
    body = {**GENERATE, "colour": "red", "parameters": {"max_new_tokens": 1, "colour": {"deep": [1]}}}
    async with router_bench(tmp_path) as bench:
        assert (await bench.post("/generate", body)).status_code == 200


async def test_line_56_content_type_must_be_json(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        for kind, status in (
            ("text/plain", 415),
            ("application/x+json", 200),
            ("application/json; charset=utf-8", 200),
        ):
            answer = await bench.client.post("/generate", content=json.dumps(GENERATE), headers={"content-type": kind})
            assert answer.status_code == status, kind
        refused = await bench.client.post("/generate", content=b"{}")
        assert (refused.status_code, refused.text) == (415, "Expected request with `Content-Type: application/json`")


async def test_line_56_a_long_body_is_refused_while_it_is_read(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--payload-limit", "5000"]) as bench:
        kind = {"content-type": "application/json"}
        declared = await bench.client.post("/generate", content=b" " * 6000, headers=kind)
        assert (declared.status_code, declared.text) == (
            413,
            "Failed to buffer the request body: length limit exceeded",
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n" + b"3e8\r\n" + b" " * 1000 + b"\r\n")
        for _ in range(6):
            writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()


async def test_line_56_api_key(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--api-key", "Secret"]) as bench:
        refused = await bench.post("/generate", GENERATE)
        assert (refused.status_code, refused.content) == (401, b"")
        wrong = await bench.post("/generate", GENERATE, headers={"authorization": "Bearer other"})
        right = await bench.post("/generate", GENERATE, headers={"authorization": "bearer SECRET"})
        assert (wrong.status_code, right.status_code) == (401, 200)
        assert (await bench.client.get("/health")).status_code == 200
        assert (await bench.post("/chat_tokenize", CHAT)).status_code == 200


async def test_line_56_cors(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--cors-allow-origin", "http://a.example"]) as bench:
        ask = {"origin": "http://a.example", "access-control-request-method": "POST"}
        preflight = await bench.client.request("OPTIONS", "/generate", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://a.example"
        assert preflight.headers["access-control-allow-methods"] == "GET,POST"
        other = await bench.client.get("/info", headers={"origin": "http://b.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_line_59_bytes_of_a_native_stream(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        body = {"inputs": "say[a|b]", "parameters": {"max_new_tokens": 9, "details": True}}
        events = await bench.events("/generate_stream", body)
    assert events == [
        '{"index":1,"token":{"id":100,"text":"a","logprob":-0.41210938,"special":false},'
        '"generated_text":null,"details":null}',
        '{"index":2,"token":{"id":101,"text":"b","logprob":-1.4121094,"special":false},'
        '"generated_text":null,"details":null}',
        '{"index":3,"token":{"id":102,"text":"</s>","logprob":-2.4121094,"special":true},"generated_text":"ab",'
        '"details":{"finish_reason":"eos_token","generated_tokens":3,"seed":null,"input_length":9}}',
    ]


async def test_line_59_only_openai_streams_end_with_done(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        native = await bench.events("/generate_stream", GENERATE)
        chat = await bench.events("/v1/chat/completions", {**CHAT, "stream": True})
        completion = await bench.events("/v1/completions", {**COMPLETION, "stream": True})
    assert "[DONE]" not in native
    assert chat[-1] == completion[-1] == "[DONE]"
    assert chat.count("[DONE]") == completion.count("[DONE]") == 1


async def test_line_59_silence_is_broken_by_a_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepseek_tgi.router.sse.KEEP_ALIVE_S", 0.05)
    async with router_bench(tmp_path) as bench:
        bench.shard.gate.clear()
        reader, writer = await bench.connect("/generate_stream", GENERATE)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b":\n\n\r\n") == b"3\r\n:\n\n\r\n"
        bench.shard.gate.set()
        assert b'"generated_text":"w0 w1 "' in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def test_line_60_headers_of_a_whole_answer(tmp_path: Path) -> None:
    whole = {"type", "time", "characters"}
    async with router_bench(tmp_path) as bench:
        native = await bench.post("/generate", GENERATE)
        chat = await bench.post("/v1/chat/completions", CHAT)
        completion = await bench.post("/v1/completions", COMPLETION)
        refused = await bench.post("/generate", {"inputs": ""})
    times = ["x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"]
    for answer in (native, chat, completion):
        assert all(re.fullmatch(r"[0-9]+", answer.headers[name]) for name in times)
        assert answer.headers["x-generated-tokens"] == "2"
        assert int(answer.headers["x-prompt-tokens"]) > 0
    assert native.headers["x-compute-characters"] == "5"
    assert native.headers["x-compute-type"] == "gpu+optimized"
    assert float(native.headers["x-compute-time"]) > 0
    assert "x-compute-time" not in completion.headers
    assert {f"x-compute-{name}" for name in whole} <= set(native.headers)
    assert not any(name.startswith("x-") for name in refused.headers)


async def test_line_60_headers_of_a_stream(tmp_path: Path) -> None:
    async with (
        router_bench(tmp_path) as bench,
        bench.client.stream("POST", "/generate_stream", json=GENERATE) as answer,
    ):
        await answer.aread()
        shown = {name: value for name, value in answer.headers.items() if name.startswith("x-")}
        assert answer.headers["cache-control"] == "no-cache"
    assert shown == {"x-compute-type": "gpu+optimized", "x-compute-characters": "5", "x-accel-buffering": "no"}


async def test_line_61_one_request_too_many_gets_429_and_a_disconnect_frees_its_place(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-concurrent-requests", "2"]) as bench:
        bench.shard.gate.clear()
        held = [await bench.connect("/generate_stream", {"inputs": "x"}) for _ in range(2)]
        await bench.until(lambda: bench.in_flight == 2)
        refused = await bench.post("/generate", GENERATE)
        assert refused.status_code == 429
        assert refused.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        streamed = await bench.json_events("/generate_stream", GENERATE)
        assert streamed == [{"error": "Model is overloaded", "error_type": "overloaded"}]
        held[0][1].close()
        await bench.until(lambda: bench.in_flight == 1, "the place of the client that left is free")
        bench.shard.gate.set()
        assert (await bench.post("/generate", GENERATE)).status_code == 200
        held[1][1].close()


async def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ranks=2) as bench:
        answers = await asyncio.gather(*(bench.post("/generate", GENERATE) for _ in range(4)))
        assert [a.json() for a in answers] == [{"generated_text": "w0 w1 "}] * 4
        assert [c for c in bench.shards[0].calls if c[0] != "ServiceDiscovery"] == bench.shards[1].calls


@pytest.mark.parametrize("chunking", [True, False])
async def test_a_thousand_malformed_bodies_leave_nothing_behind(tmp_path: Path, chunking: bool) -> None:
    async with router_bench(tmp_path, traits=Traits(support_chunking=chunking)) as bench:
        whole = json.dumps({**GENERATE, "stream": True}).encode()
        await _all_cuts(bench, whole)
        assert (await bench.post("/generate", GENERATE)).status_code == 200


async def _all_cuts(bench: Bench, whole: bytes) -> None:
    kind = {"content-type": "application/json"}
    for cut in range(len(whole)):
        for piece in (whole[:cut], whole[:cut] + b"\x00" + whole[cut + 1 :]):
            answer = await bench.client.post("/generate", content=piece, headers=kind)
            assert answer.status_code in {200, 400, 422}, piece


async def test_a_client_that_closes_its_sending_half_still_hears_a_refusal(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        for wish, status in (({"inputs": 5}, b"422"), ({"inputs": "x" * 2000}, b"422"), (GENERATE, b"200")):
            reader, writer = await bench.connect("/generate", wish)
            writer.write_eof()
            assert (await reader.readline()).split()[1] == status
            writer.close()
