"""The engine over DeepSeek models: transformers' greedy tokens in any arrangement of the work and any kind of cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from deepseek_checkpoint import YARN
from engine_driver import Driver
from oracles.greedy import GreedyOracle
from stepper import Stepper

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import Request, StopRule

TEXTS = ["hello the thing", "an other", "a long one: " + "the wing in on " * 12]
TURNS = "<|im_start|>system\nBe brief and say the thing once.<|im_end|>\n" + "".join(
    f"<|im_start|>user\nQuestion {n}: what is on the wing in the other ring?<|im_end|>\n"
    f"<|im_start|>assistant\nIt is the {n * 37 % 11}th thing in the long row.<|im_end|>\n"
    for n in range(1, 4)
)
"""A system prompt and three turns: some fifteen blocks."""
NEW = 18
MODES = ("float32", "bfloat16", "float16", "fp8_e4m3fn", "int8", "int4")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    config = {"rope_scaling": YARN, "n_shared_experts": 2}
    return tiny_checkpoint(tmp_path_factory.mktemp("v2"), "deepseek_v2", "awq-gemm", config=config)


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    config = {"num_nextn_predict_layers": 1}
    return tiny_checkpoint(tmp_path_factory.mktemp("v3"), "deepseek_v3", "awq-gemm", config=config)


def adapter_of(checkpoint: TinyCheckpoint, **options: Any) -> QuantizedModelAdapter:
    merged: dict[str, Any] = {"dtype": "float32", "num_threads": 1, **options}
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=LoadOptions(**merged))


def driver_of(checkpoint: TinyCheckpoint, counts: Counter[str] | None = None, **options: Any) -> Driver:
    def count(name: str, by: int) -> None:
        if counts is not None:
            counts[name] += by

    return Driver(adapter_of(checkpoint, **options), max_prefill=128, max_total=512, counter=count)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", ["second", "third"])
def test_greedy_tokens_and_logprobs_equal_transformers(
    family: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    checkpoint: TinyCheckpoint = request.getfixturevalue(family)
    driver = driver_of(checkpoint, kernels=kernels)
    oracle = GreedyOracle(checkpoint.reference())
    for text in TEXTS:
        prompt = driver.adapter.tokenizer.encode(text)
        found = driver.run(answer(driver, text))[0]
        assert found.ids == oracle.greedy(prompt, NEW)
        assert found.logprobs == pytest.approx(oracle.greedy_logprobs(prompt, NEW), abs=1e-3)


@pytest.mark.parametrize("mode", ["float32", "int4"])
def test_batched_cut_and_joined_requests_get_the_same_tokens_and_logprobs(third: TinyCheckpoint, mode: str) -> None:
    driver = driver_of(third, kv_cache_dtype=mode)
    wanted = [driver.run(answer(driver, text))[0] for text in TEXTS]
    together = [answer(driver, text) for text in TEXTS]
    driver.run(*together)
    cut = answer(driver, TEXTS[2], chunk_len=9)
    late = [answer(driver, text) for text in TEXTS[:2]]
    batch = driver.prefill(70, cut).batch
    batch = driver.prefill(71, late[0], cached=batch).batch
    batch = driver.prefill(72, late[1], cached=batch).batch
    driver.finish(batch)
    for ours, found in zip([*together, *late, cut], [*wanted, *wanted], strict=True):
        assert driver.results[ours.id].ids == found.ids
        assert driver.results[ours.id].logprobs == pytest.approx(found.logprobs, abs=1e-4)


def answer(driver: Driver, text: str, **fields: Any) -> Request:
    """A request for `NEW` tokens, whatever they are."""
    return driver.request(text, stop=StopRule(NEW, ignore_eos=True), **fields)


def claim(driver: Driver, text: str, owner: Request, num_blocks: int) -> Request:
    """A request whose first blocks are `owner`'s, as the router's prefix cache gives it."""
    count = -(-(len(driver.adapter.tokenizer.encode(text)) + NEW - 1) // 16)
    own = [driver.free.pop() for _ in range(count - num_blocks)]
    return answer(driver, text, blocks=[*owner.blocks[:num_blocks], *own], cache_len=16 * num_blocks)


@pytest.mark.parametrize("mode", MODES)
def test_answers_over_reused_prefixes_are_the_cold_ones_and_counts_are_true(second: TinyCheckpoint, mode: str) -> None:
    counts: Counter[str] = Counter()
    driver = driver_of(second, counts, kv_cache_dtype=mode)
    text = "the wing in on " * 9
    other = text[:75] + "quite another end of it"
    ids, other_ids = (driver.adapter.tokenizer.encode(t) for t in (text, other))
    same = next(i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b)
    assert 48 < len(ids) < 80
    assert 32 <= same < 48
    cold, cold_other = (driver.run(answer(driver, t))[0] for t in (text, other))
    counts.clear()
    owner = answer(driver, text)
    driver.run(owner)
    assert not counts, "nothing was claimed yet"
    again = driver.run(claim(driver, text, owner, 3))[0]
    assert counts == {"prefix_tokens_reused": 48}
    half = driver.run(claim(driver, other, owner, 2))[0]
    assert counts == {"prefix_tokens_reused": 48 + 32}
    assert (again.ids, half.ids) == (cold.ids, cold_other.ids)
    # Another chunk may round a latent to the neighbouring code; nothing more.
    rounding = 1e-4 if mode == "float32" else 2e-2
    assert again.logprobs == pytest.approx(cold.logprobs, abs=rounding)
    assert half.logprobs == pytest.approx(cold_other.logprobs, abs=rounding)


def test_a_whole_prompt_that_is_stored_is_read_and_not_written(third: TinyCheckpoint) -> None:
    driver = driver_of(third, kv_cache_dtype="int8")
    ids = driver.adapter.tokenizer.encode("the wing in on " * 30)[:48]
    text = driver.adapter.tokenizer.decode(ids, skip_special_tokens=True)
    assert driver.adapter.tokenizer.encode(text) == ids, "the prompt fills three blocks"
    owner = answer(driver, text)
    wanted = driver.run(owner)[0]
    runner = driver.engine._runner
    assert runner is not None
    before = runner.pool.storage[list(owner.blocks[:3])].clone()
    again = claim(driver, text, owner, 3)
    assert driver.run(again)[0].ids == wanted.ids
    assert torch.equal(runner.pool.storage[list(owner.blocks[:3])], before)


@pytest.mark.parametrize(("mode", "bound"), [("bfloat16", 0.01), ("fp8_e4m3fn", 0.08), ("int8", 0.02), ("int4", 0.18)])
def test_several_turns_over_many_blocks_hold_with_a_quantised_latent(
    second: TinyCheckpoint, mode: str, bound: float
) -> None:
    """Agreement of the next-token distribution with an unquantised cache, at every position of the conversation."""
    plain, low = (scored(adapter_of(second, kv_cache_dtype=m)) for m in ("float32", mode))
    assert len(plain) > 15 * 16
    gap = (plain.softmax(-1) - low.softmax(-1)).abs().sum(-1) / 2  # total variation, 0 to 1
    assert float(gap.mean()) <= bound
    first, last = gap[:32].mean(), gap[-32:].mean()
    assert float(last) <= 1.5 * float(first) + bound / 4, "errors do not grow with the conversation"
    agreeing = (plain.argmax(-1) == low.argmax(-1)).float().mean()
    assert float(agreeing) >= 1 - 2 * bound


def scored(adapter: QuantizedModelAdapter) -> torch.Tensor:
    """Logits `[n, V]` at every position of the turns, fed in steps of one turn's size and then token by token."""
    ids = adapter.tokenizer.encode(TURNS)
    return Stepper(adapter).run(ids, [64, 80, 70])
