"""A DeepSeek-V3 model as a user starts it: what the launcher derives, what `/info` tells, what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from builders import tiny_checkpoint
from launched_server import LaunchedServer
from tiny_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from builders import TinyCheckpoint

NEW = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("v3") / "model", "deepseek_v3", "awq-gemm")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, checkpoint: TinyCheckpoint) -> Iterator[LaunchedServer]:
    exact = ["--dtype", "float32", "--kv-cache-dtype", "float32"]
    running = LaunchedServer.start(checkpoint.path, tmp_path_factory.mktemp("v3-server"), exact)
    yield running
    running.stop()


def test_limits_are_the_models_own(served: LaunchedServer, checkpoint: TinyCheckpoint) -> None:
    info = served.http.get(f"{served.url}/info").json()
    assert info["model_id"] == str(checkpoint.path)
    # Nothing was given: the context of the model, and one place of it for a new token.
    assert info["max_total_tokens"] == checkpoint.config["max_position_embeddings"] == 512
    assert info["max_input_tokens"] == 511


def test_a_shard_is_told_what_tgi_tells_it(served: LaunchedServer) -> None:
    environ = Path(f"/proc/{served.shard_pid}/environ").read_bytes().decode().split("\0")
    # TGI's launcher takes hidden_size / heads for the head size: 128 / 4 = 32 is none that its kernels have.
    assert {"ATTENTION=paged", "PREFIX_CACHING=0"} <= set(environ)
    assert " --quantize awq" in served.children()[served.shard_pid]


def test_the_answer_is_what_the_model_says(served: LaunchedServer, checkpoint: TinyCheckpoint) -> None:
    from oracles.greedy import GreedyOracle

    tokenizer = build_tokenizer()
    prompt = "It was the best of times, it was the worst of times"
    wanted = GreedyOracle(checkpoint.reference()).greedy(tokenizer.encode(prompt).ids, NEW)
    for attempt in ("computed", "from a stored prefix"):
        answer = served.generate(prompt, max_new_tokens=NEW)
        assert [token["id"] for token in answer["details"]["tokens"]] == wanted, attempt
    assert answer["generated_text"] == tokenizer.decode(wanted)


def test_a_request_beyond_the_context_is_refused(served: LaunchedServer) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 512}}
    response = served.post("/generate", body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
