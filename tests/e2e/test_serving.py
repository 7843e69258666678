"""What `curl` gets from a server that the launcher started, against `transformers` on the same weights."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest
from launched_server import LaunchedServer
from tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer

if TYPE_CHECKING:
    from builders import TinyCheckpoint
    from oracles.greedy import GreedyOracle

PROMPT = "It was the best of times"
NEW = 12


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint_awq: TinyCheckpoint) -> GreedyOracle:
    """The truth about the tiny model."""
    from oracles.greedy import GreedyOracle

    return GreedyOracle(tiny_checkpoint_awq.reference())


def test_generate_says_what_the_model_says(server: LaunchedServer, oracle: GreedyOracle) -> None:
    tokenizer = build_tokenizer()
    wanted = oracle.greedy(tokenizer.encode(PROMPT).ids, NEW)
    answer = server.generate(PROMPT, max_new_tokens=NEW)
    details = answer["details"]
    assert [t["id"] for t in details["tokens"]] == wanted
    assert details["generated_tokens"] == NEW
    assert details["finish_reason"] == "length"
    assert answer["generated_text"] == tokenizer.decode(wanted)


def test_generate_stream_sends_the_same_tokens(server: LaunchedServer) -> None:
    whole = server.generate(PROMPT, max_new_tokens=NEW)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NEW, "details": True}}
    events = [json.loads(e) for e in server.events("/generate_stream", body)]
    assert [e["token"] for e in events] == whole["details"]["tokens"]
    assert [e["index"] for e in events] == list(range(1, NEW + 1))
    assert [e["generated_text"] for e in events[:-1]] == [None] * (NEW - 1)
    assert events[-1]["generated_text"] == whole["generated_text"]


def chat(**more: object) -> dict[str, object]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    return {"model": "tgi", "messages": messages, "max_tokens": NEW, "temperature": 0, **more}


def test_chat_completion_renders_the_template_and_answers(server: LaunchedServer, oracle: GreedyOracle) -> None:
    assert "<|im_start|>" in CHAT_TEMPLATE
    text = (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = build_tokenizer(add_bos=False).encode(text).ids
    response = server.post("/v1/chat/completions", chat(logprobs=True))
    assert response.status_code == 200, response.text
    body = response.json()
    choice = body["choices"][0]
    wanted = oracle.greedy(ids, NEW)
    assert body["usage"] == {"prompt_tokens": len(ids), "completion_tokens": NEW, "total_tokens": len(ids) + NEW}
    assert choice["message"] == {"role": "assistant", "content": build_tokenizer().decode(wanted)}
    assert choice["finish_reason"] == "length"
    logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(oracle.greedy_logprobs(ids, NEW), abs=1e-3)


@pytest.mark.parametrize("usage", [True, False, None])
def test_chat_stream_adds_up_to_the_whole_and_counts_when_asked(server: LaunchedServer, usage: bool | None) -> None:
    whole = server.post("/v1/chat/completions", chat()).json()
    more = {} if usage is None else {"stream_options": {"include_usage": usage}}
    events = server.events("/v1/chat/completions", chat(stream=True, **more))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    counted = [c for c in chunks if c.get("usage")]
    assert [c["usage"] for c in counted] == ([whole["usage"]] if usage else [])
    if usage:
        assert chunks[-1]["choices"] == []
        chunks = chunks[:-1]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (NEW - 1) + ["length"]


def test_completions_answer_several_prompts(server: LaunchedServer) -> None:
    body = {"model": "tgi", "prompt": [PROMPT, "the"], "max_tokens": 5, "temperature": 0}
    answer = server.post("/v1/completions", body).json()
    texts = {c["index"]: c["text"] for c in answer["choices"]}
    assert texts[0] == server.generate(PROMPT, max_new_tokens=5)["generated_text"]
    assert texts[1] == server.generate("the", max_new_tokens=5)["generated_text"]


def test_the_quiet_routes_answer(server: LaunchedServer) -> None:
    for path in ("/health", "/ping", "/info", "/v1/models", "/metrics", "/docs", "/api-doc/openapi.json"):
        assert httpx.get(server.url + path, timeout=10).status_code == 200, path
    assert httpx.get(f"{server.url}/info", timeout=10).json()["max_total_tokens"] == 512
    tokens = server.post("/tokenize", {"inputs": PROMPT}).json()
    assert [t["id"] for t in tokens] == build_tokenizer().encode(PROMPT).ids


def test_parallel_requests_answer_as_alone(server: LaunchedServer) -> None:
    import concurrent.futures

    prompts = [PROMPT[: 3 + i] for i in range(8)]
    alone = [server.generate(p, max_new_tokens=20)["generated_text"] for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: server.generate(p, max_new_tokens=20)["generated_text"], prompts))
    assert together == alone


def test_curl_itself(server: LaunchedServer) -> None:
    body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 4}})
    command = ["curl", "-sS", "-N", f"{server.url}/generate_stream", "-X", "POST", "-d", body]
    try:
        done = subprocess.run(
            [*command, "-H", "Content-Type: application/json"], capture_output=True, timeout=60, check=False
        )
    except FileNotFoundError:
        pytest.skip("curl is not installed")
    assert done.stdout.count(b"data:") == 4, done


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "chat", "chat stream"])
def test_the_real_model_answers_in_sensible_english(real_server: LaunchedServer, path: str) -> None:
    if path.startswith("/"):
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 12}}
        if path == "/generate":
            text = real_server.post(path, body).json()["generated_text"]
        else:
            text = json.loads(real_server.events(path, body)[-1])["generated_text"]
    else:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        chatted = {"model": "tgi", "messages": question, "max_tokens": 24, "temperature": 0}
        if path == "chat":
            text = real_server.post("/v1/chat/completions", chatted).json()["choices"][0]["message"]["content"]
        else:
            events = real_server.events("/v1/chat/completions", {**chatted, "stream": True})
            text = "".join(json.loads(e)["choices"][0]["delta"]["content"] for e in events[:-1])
    assert "Paris" in text
