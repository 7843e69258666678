"""Unmodified clients against the served models: huggingface_hub, openai, and text-generation in its own environment."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import huggingface_hub
import openai
import pytest
from huggingface_hub import InferenceClient
from launched_server import LaunchedServer
from peers import PEERS

PROMPT = "In the beginning"


@pytest.fixture(autouse=True)
def may_reach_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite runs with the hub's offline switch on, which also stops its client from calling our server."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def test_inference_client_generates_and_streams(server: LaunchedServer) -> None:
    client = InferenceClient(server.url)
    whole = client.text_generation(PROMPT, max_new_tokens=8, details=True, do_sample=False)
    assert whole.details is not None
    assert whole.details.generated_tokens == 8
    pieces = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True, do_sample=False))
    assert [p.token.id for p in pieces] == [t.id for t in whole.details.tokens]
    assert pieces[-1].generated_text == whole.generated_text
    assert client.text_generation(PROMPT, max_new_tokens=8, do_sample=False) == whole.generated_text


def test_inference_client_chats(server: LaunchedServer) -> None:
    client = InferenceClient(base_url=server.url)
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat_completion(messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content) == 8
    chunks = list(client.chat_completion(messages, max_tokens=8, temperature=0, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_inference_client_reports_a_refusal_with_its_reason(server: LaunchedServer) -> None:
    client = InferenceClient(server.url)
    with pytest.raises(Exception, match=r"must be strictly positive|temperature"):
        client.text_generation(PROMPT, max_new_tokens=2, temperature=-1.0)


def openai_client(server: LaunchedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)


def test_openai_client_chats_and_streams(server: LaunchedServer) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    with openai_client(server) as client:
        whole = client.chat.completions.create(model="tgi", messages=messages, max_tokens=8, temperature=0)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8
        stream = client.chat.completions.create(
            model="tgi",
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[-1].usage == whole.usage
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_openai_client_completes_lists_models_and_raises_its_own_errors(server: LaunchedServer) -> None:
    with openai_client(server) as client:
        done = client.completions.create(model="tgi", prompt=PROMPT, max_tokens=5, temperature=0)
        assert done.choices[0].text == server.generate(PROMPT, max_new_tokens=5)["generated_text"]
        pieces = list(client.completions.create(model="tgi", prompt=PROMPT, max_tokens=5, temperature=0, stream=True))
        assert "".join(p.choices[0].text for p in pieces) == done.choices[0].text
        assert client.models.list().data[0].object == "model"
        with pytest.raises(openai.UnprocessableEntityError):
            client.chat.completions.create(model="tgi", messages=[{"role": "user", "content": "x"}], temperature=-1)


async def test_openai_async_client_streams(server: LaunchedServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tgi", messages=[{"role": "user", "content": PROMPT}], max_tokens=6, temperature=0, stream=True
        )
        assert len([chunk async for chunk in stream]) == 6


def test_real_model_through_both_clients(real_server: LaunchedServer) -> None:
    question = "What is the capital of France?"
    hub = InferenceClient(base_url=real_server.url).chat_completion(
        [{"role": "user", "content": question}], max_tokens=24, temperature=0
    )
    with openai_client(real_server) as client:
        other = client.chat.completions.create(
            model="tgi", messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
        )
    assert "Paris" in (hub.choices[0].message.content or "")
    assert other.choices[0].message.content == hub.choices[0].message.content


OLD_CLIENT = """
import asyncio, json, sys
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

url, prompt = sys.argv[1:]
client = Client(url, timeout=60)
whole = client.generate(prompt, max_new_tokens=8, best_of=1, top_n_tokens=2)
stream = list(client.generate_stream(prompt, max_new_tokens=8))

async def again():
    return [e.token.id async for e in AsyncClient(url, timeout=60).generate_stream(prompt, max_new_tokens=8)]

async_ids = asyncio.run(again())
try:
    client.generate(prompt, max_new_tokens=100000, truncate=100000)
    refused = None
except ValidationError as error:
    refused = str(error)
chat = client.chat(messages=[{"role": "user", "content": prompt}], max_tokens=4, temperature=0.5, seed=1)
print(json.dumps({
    "text": whole.generated_text, "ids": [t.id for t in whole.details.tokens],
    "prefill": len(whole.details.prefill), "reason": whole.details.finish_reason.value,
    "streamed": [e.token.id for e in stream], "streamed_text": stream[-1].generated_text,
    "async_ids": async_ids, "refused": refused, "chat": chat.choices[0].message.content,
}))
"""


def test_text_generation_client(server: LaunchedServer) -> None:
    peer = PEERS["tgi-client"]
    if not peer.ready:
        pytest.skip(f"{peer.folder} is absent: `python -m tests.peers` makes it ({peer.reason})")
    command = [str(peer.python), "-c", OLD_CLIENT, server.url, PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    wanted = server.generate(PROMPT, max_new_tokens=8)
    assert said["text"] == said["streamed_text"] == wanted["generated_text"]
    assert said["ids"] == said["streamed"] == said["async_ids"] == [t["id"] for t in wanted["details"]["tokens"]]
    assert said["reason"] == "length"
    assert "truncate" in said["refused"]
    assert isinstance(said["chat"], str)
