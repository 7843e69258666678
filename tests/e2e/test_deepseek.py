"""A DeepSeek-V3 model as a user starts it: what the launcher derives, what `/info` tells, what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from builders import tiny_checkpoint
from deepseek_checkpoint import YARN
from launched_server import LaunchedServer
from tiny_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from builders import TinyCheckpoint
    from oracles.greedy import GreedyOracle

NEW = 10
TEXT = "It was the best of times, and on the other wing it was another thing in the long ring. " * 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """In two files, with YaRN and a layer for further tokens."""
    config = {"num_nextn_predict_layers": 1, "rope_scaling": YARN}
    folder = tmp_path_factory.mktemp("v3") / "model"
    return tiny_checkpoint(folder, "deepseek_v3", "awq-gemm", shards=2, seed=1, config=config)


@pytest.fixture(scope="module")
def oracle(checkpoint: TinyCheckpoint) -> GreedyOracle:
    from oracles.greedy import GreedyOracle

    return GreedyOracle(checkpoint.reference())


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


def test_the_answer_is_what_the_model_says_cold_and_over_a_stored_prefix(
    served: LaunchedServer, oracle: GreedyOracle
) -> None:
    tokenizer = build_tokenizer()
    prompt = tokenizer.encode(TEXT).ids
    wanted = oracle.greedy(prompt, NEW)
    assert len(prompt) > 5 * 16
    for reused in (0, 16 * (len(prompt) // 16)):
        before = served.metric("deepseek_tgi_prompt_tokens_reused")
        answer = served.generate(TEXT, max_new_tokens=NEW)
        assert served.metric("deepseek_tgi_prompt_tokens_reused") - before == reused
        tokens = answer["details"]["tokens"]
        assert [token["id"] for token in tokens] == wanted
        assert [token["logprob"] for token in tokens] == pytest.approx(oracle.greedy_logprobs(prompt, NEW), abs=1e-3)
    assert answer["generated_text"] == tokenizer.decode(wanted)


def test_many_at_once_get_their_own_answers(served: LaunchedServer, oracle: GreedyOracle) -> None:
    texts = [TEXT[: 20 + 25 * i] for i in range(6)]
    with ThreadPoolExecutor(len(texts)) as threads:
        answers = list(threads.map(lambda text: served.generate(text, max_new_tokens=NEW), texts))
    for text, answer in zip(texts, answers, strict=True):
        ids = [token["id"] for token in answer["details"]["tokens"]]
        assert ids == oracle.greedy(build_tokenizer().encode(text).ids, len(ids))


def test_its_log_says_what_was_loaded_and_what_was_left_out(served: LaunchedServer) -> None:
    words = served.words()
    assert "loaded deepseek_v3, 2 layers" in words
    assert "layers from 2 on predict further tokens" in words


def test_a_request_beyond_the_context_is_refused(served: LaunchedServer) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 512}}
    response = served.post("/generate", body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
