"""A claimed prefix is used where it is stored and computed again where it is not; the text never changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from scripted import ScriptedAdapter

from deepseek_tgi.core import ForwardInputs, Request

PROMPT = "the stop is one two Hello world " * 3
BLOCK = 16


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def driver(tmp_path: Path, counts: Counter[str]) -> Driver:
    def count(name: str, by: int) -> None:
        counts[name] += by

    return Driver(ScriptedAdapter.in_folder(tmp_path), counter=count)


def ids(driver: Driver, text: str) -> list[int]:
    return driver.adapter.tokenizer.encode(text)


def claim(driver: Driver, blocks: tuple[int, ...], cache_len: int, text: str = PROMPT) -> Request:
    """A request whose first blocks are another's, as the router's prefix cache would give it."""
    shared = list(blocks[: -(-cache_len // BLOCK)])
    need = -(-(len(ids(driver, text)) + 5) // BLOCK) - len(shared)
    own = [driver.free.pop() for _ in range(max(need, 0))]
    return driver.request(text, 6, blocks=[*shared, *own], cache_len=cache_len)


def first_step(driver: Driver, request: Request) -> tuple[int, int]:
    """(tokens cached, tokens fed) of the request's first step; then runs it to its end and checks its text."""
    driver.adapter.steps.clear()
    result = driver.prefill(500 + request.id, request)
    step = driver.adapter.steps[0]
    driver.finish(result.batch)
    found = driver.results[request.id]
    assert found.ids == driver.adapter.greedy(request.text, 6)
    return step.cache_lens[0], step.counts[0]


def test_stored_blocks_are_reused_and_only_the_rest_is_computed(driver: Driver, counts: Counter[str]) -> None:
    length = len(ids(driver, PROMPT))
    first = driver.request(PROMPT, 6)
    driver.run(first)
    assert first_step(driver, claim(driver, first.blocks, 2 * BLOCK)) == (2 * BLOCK, length - 2 * BLOCK)
    assert counts == {"prefix_tokens_reused": 2 * BLOCK}


def test_a_full_hit_computes_the_last_token_and_leaves_readers_alone(driver: Driver) -> None:
    text = "a" * (3 * BLOCK)
    assert len(ids(driver, text)) == 3 * BLOCK
    reader = driver.request(text, 20)
    batch = driver.prefill(0, reader).batch
    before = driver.engine._runner.pool.view(0).k.clone()  # type: ignore[union-attr]
    assert first_step(driver, claim(driver, reader.blocks, 3 * BLOCK - 1, text)) == (3 * BLOCK - 1, 1)
    shared = list(reader.blocks[:3])
    assert (driver.engine._runner.pool.view(0).k[shared] == before[shared]).all()  # type: ignore[union-attr]
    driver.finish(batch)
    assert driver.results[reader.id].ids == driver.adapter.greedy(text, 20)


def test_blocks_that_were_never_written_are_computed(driver: Driver, counts: Counter[str]) -> None:
    blocks = tuple(driver.free.pop() for _ in range(3))
    assert first_step(driver, claim(driver, blocks, 2 * BLOCK))[0] == 0
    assert counts["prefix_tokens_rejected"] == 2 * BLOCK


def test_blocks_of_another_prompt_are_computed_from_the_first_difference(driver: Driver) -> None:
    other = PROMPT[:40] + "XX" + PROMPT[42:]
    differs = next(i for i, (a, b) in enumerate(zip(ids(driver, PROMPT), ids(driver, other), strict=False)) if a != b)
    assert BLOCK < differs < 2 * BLOCK
    first = driver.request(other, 6)
    driver.run(first)
    assert first_step(driver, claim(driver, first.blocks, 2 * BLOCK))[0] == differs


def test_blocks_that_generated_tokens_took_over_are_not_believed(driver: Driver) -> None:
    first = driver.request(PROMPT, 6)
    driver.run(first)
    # Another request's output runs through the second block, which the router then still believes in.
    thief = driver.request("b" * BLOCK, 12, blocks=[driver.free.pop(), first.blocks[1]])
    driver.run(thief)
    assert first_step(driver, claim(driver, first.blocks, 2 * BLOCK))[0] == BLOCK


def test_a_prefix_from_a_failed_step_is_not_believed(driver: Driver) -> None:
    first = driver.request(PROMPT, 6)

    def fail(_: object) -> None:
        raise RuntimeError("lost")

    driver.adapter.script.before_step = fail
    with pytest.raises(RuntimeError):
        driver.prefill(0, first)
    driver.adapter.script.before_step = None
    assert first_step(driver, claim(driver, first.blocks, 2 * BLOCK))[0] == 0


def test_a_failed_step_may_have_overwritten_what_was_stored(driver: Driver) -> None:
    first = driver.request(PROMPT, 6)
    driver.run(first)

    def overwrite_and_fail(inputs: ForwardInputs) -> None:
        pages = driver.engine._runner.pool.view(0)  # type: ignore[union-attr]
        pages.k[inputs.slots // BLOCK, 0, inputs.slots % BLOCK] = 3.0
        raise RuntimeError("lost")

    driver.adapter.script.before_step = overwrite_and_fail
    with pytest.raises(RuntimeError):
        driver.prefill(0, driver.request("b" * 40, 6, blocks=list(first.blocks)))
    driver.adapter.script.before_step = None
    assert first_step(driver, claim(driver, first.blocks, 2 * BLOCK))[0] == 0


def test_a_generated_continuation_can_be_claimed_as_a_prompt(driver: Driver) -> None:
    first = driver.request("a" * 20, 14)
    driver.run(first)
    whole = [*ids(driver, "a" * 20), *driver.results[first.id].ids][:32]
    guard = driver.engine._runner.guard  # type: ignore[union-attr]
    assert guard.verified(torch.tensor(whole), torch.tensor(first.slots[:32])) == 32


def test_a_false_claim_costs_no_more_than_the_budget(driver: Driver) -> None:
    text = "a" * 150
    blocks = tuple(driver.free.pop() for _ in range(10))
    running = driver.request("Hello", 30)
    batch = driver.prefill(0, running).batch
    liar = driver.request(text, 5, blocks=list(blocks), cache_len=9 * BLOCK)
    driver.adapter.steps.clear()
    result = driver.prefill(1, liar, cached=batch)
    assert driver.adapter.steps[0].counts == [1, 63]
    driver.finish(result.batch)
    assert all(sum(step.counts) <= 64 for step in driver.adapter.steps)
    assert driver.results[liar.id].ids == driver.adapter.greedy(text, 5)
    assert driver.results[running.id].ids == driver.adapter.greedy("Hello", 30)


def test_a_claim_longer_than_the_prompt_is_cut(driver: Driver) -> None:
    first = driver.request(PROMPT, 6)
    driver.run(first)
    length = len(ids(driver, PROMPT))
    request = driver.request(PROMPT, 6, blocks=list(first.blocks), cache_len=length + 50)
    assert first_step(driver, request) == (length - 1, 1)


def test_two_claims_on_blocks_that_this_very_step_writes(driver: Driver) -> None:
    first = driver.request(PROMPT[:60], 6)
    second = claim(driver, first.blocks, BLOCK, PROMPT[:60] + "tail")
    driver.run(first, second)
    for request in (first, second):
        assert driver.results[request.id].ids == driver.adapter.greedy(request.text, 6)
