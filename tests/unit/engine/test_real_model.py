"""The engine over the package's own backend: transformers' greedy tokens, however the router arranges the work."""

from __future__ import annotations

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from engine_driver import Driver

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

TEXTS = ["hello the thing", "an other", "a long one: " + "the wing in on " * 12]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", "awq-gemm", seed=3)


def driver_of(checkpoint: TinyCheckpoint, kv_cache_dtype: str) -> Driver:
    options = LoadOptions(dtype="float32", kv_cache_dtype=kv_cache_dtype, num_threads=1)
    return Driver(QuantizedModelAdapter.get_model(str(checkpoint.path), options=options), max_prefill=128)


@pytest.fixture(params=["float32", "int8", "fp8", "int4"])
def driver(request: pytest.FixtureRequest, checkpoint: TinyCheckpoint) -> Driver:
    return driver_of(checkpoint, request.param)


def alone(driver: Driver) -> list[tuple[list[int], list[float]]]:
    found = [driver.run(driver.request(text, 16))[0] for text in TEXTS]
    return [(f.ids, f.logprobs) for f in found]


def test_greedy_tokens_equal_transformers(checkpoint: TinyCheckpoint) -> None:
    driver = driver_of(checkpoint, "float32")
    reference = checkpoint.reference()
    for text, (ids, logprobs) in zip(TEXTS, alone(driver), strict=True):
        history = driver.adapter.tokenizer.encode(text)
        for token_id, logprob in zip(ids, logprobs, strict=True):
            with torch.no_grad():
                wanted = reference(torch.tensor([history])).logits[0, -1].log_softmax(-1)
            assert float(wanted.max() - wanted[token_id]) < 1e-4
            assert logprob == pytest.approx(float(wanted[token_id]), abs=1e-3)
            history.append(token_id)


def test_batched_cut_and_joined_requests_get_the_same_tokens_and_logprobs(driver: Driver) -> None:
    wanted = alone(driver)
    together = [driver.request(text, 16) for text in TEXTS]
    driver.run(*together)
    cut = driver.request(TEXTS[2], 16, chunk_len=9)
    late = [driver.request(text, 16) for text in TEXTS[:2]]
    batch = driver.prefill(70, cut).batch
    batch = driver.prefill(71, late[0], cached=batch).batch
    batch = driver.prefill(72, late[1], cached=batch).batch
    driver.finish(batch)
    for request, (ids, logprobs) in zip([*together, *late, cut], [*wanted, *wanted], strict=True):
        assert driver.results[request.id].ids == ids
        assert driver.results[request.id].logprobs == pytest.approx(logprobs, abs=1e-5)


def test_a_reused_prefix_gives_the_same_tokens(driver: Driver) -> None:
    first = driver.request(TEXTS[2], 16)
    wanted = driver.run(first)[0].ids
    count = (len(driver.adapter.tokenizer.encode(TEXTS[2])) - 1) // 16
    own = [driver.free.pop() for _ in range(len(first.blocks) - count)]
    again = driver.request(TEXTS[2], 16, blocks=[*first.blocks[:count], *own], cache_len=16 * count)
    assert driver.run(again)[0].ids == wanted
