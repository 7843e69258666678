"""The launcher without a model id: the bundled model, on every kind of route, soon."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from launched_server import LaunchedServer

SOON_S = 60.0
"""From launch to the first answer; many times what it takes, so that a busy machine does not matter."""
CAPITAL = "What is the capital of France?"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MODEL_ID", raising=False)
        started = time.monotonic()
        running = LaunchedServer.start(None, tmp_path_factory.mktemp("demo-server"))
    try:
        answer = running.generate("The capital of France is", max_new_tokens=2)
        took = time.monotonic() - started
        assert answer["generated_text"].startswith(" Paris"), answer
        assert took < SOON_S
        yield running
    finally:
        running.stop()


def test_info_names_it_and_its_context(served: LaunchedServer) -> None:
    info = served.http.get(f"{served.url}/info").json()
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("demo", 2048, 2047)


def test_a_completion_streams_to_the_text_that_generate_gives(served: LaunchedServer) -> None:
    whole = served.generate("The capital of France is", max_new_tokens=8)["generated_text"]
    body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
    events = [json.loads(payload) for payload in served.events("/generate_stream", body)]
    assert events[-1]["generated_text"] == whole
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == whole


def test_a_chat_streams_an_answer(served: LaunchedServer) -> None:
    messages = [{"role": "user", "content": CAPITAL}]
    body = {"model": "tgi", "messages": messages, "stream": True, "max_tokens": 40, "temperature": 0}
    *events, last = served.events("/v1/chat/completions", body)
    assert last == "[DONE]"
    choices = [choice for event in map(json.loads, events) for choice in event["choices"]]
    assert "Paris" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] in {"stop", "eos_token"}
