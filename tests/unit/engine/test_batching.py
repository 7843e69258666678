"""Whatever the router does with batches, every request gets the text it would get alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from scripted import ScriptedAdapter

from deepseek_tgi.core import HEALTH_REQUEST_ID, FinishReason, Request, SamplingParams, StopRule
from deepseek_tgi.engine.runner import Ahead, Runner
from deepseek_tgi.errors import BatchNotFoundError, RequestError, ResourceError

LONG = "one two the stop is Par " * 20
PROMPTS = ["Hello world", "the stop is", LONG, "é😀x"]


@pytest.fixture(params=["as asked", "a step ahead", "tokens unread"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    adapter.takes_unread = request.param == "tokens unread"
    made = Driver(adapter)
    runner = made.engine._runner
    assert runner is not None
    runner._runs_ahead = request.param != "as asked"  # as on a GPU
    return made


def expect_greedy(driver: Driver, request: Request) -> None:
    found = driver.results[request.id]
    assert found.done
    assert found.ids == driver.adapter.greedy(request.text, len(found.ids))
    assert len(found.ids) == request.stop.max_new_tokens


def test_one_batch_gives_each_request_its_own_text(driver: Driver) -> None:
    requests = [driver.request(text, 5 + i) for i, text in enumerate(PROMPTS)]
    driver.run(*requests)
    for request in requests:
        expect_greedy(driver, request)


def test_requests_that_end_at_once_leave_no_batch(driver: Driver) -> None:
    result = driver.prefill(0, *(driver.request(text, 1) for text in PROMPTS[:2]))
    assert result.batch is None
    assert [g.generated_text is not None for g in result.generations] == [True, True]


def test_a_batch_names_its_requests_in_order_and_what_it_holds(driver: Driver) -> None:
    requests = [driver.request("Hello", 4), driver.request("the stop", 4)]
    batch = driver.prefill(7, *requests).batch
    assert batch is not None
    assert (batch.id, batch.request_ids, batch.size) == (7, (requests[0].id, requests[1].id), 2)
    assert batch.max_tokens == 16 * sum(len(r.blocks) for r in requests)
    assert batch.current_tokens == 2


def test_shared_blocks_are_counted_once(driver: Driver) -> None:
    first = driver.request("a" * 40, 8)
    shared = list(first.blocks[:2])
    second = driver.request("a" * 40, 8, blocks=[*shared, driver.free.pop()], cache_len=32)
    batch = driver.prefill(0, first, second).batch
    assert batch is not None
    assert batch.max_tokens == 16 * 4


def test_joining_late_changes_nothing(driver: Driver) -> None:
    old, new = driver.request("Hello world", 12), driver.request("the stop is", 6)
    batch = driver.prefill(0, old).batch
    assert batch is not None
    batch = driver.decode(batch.id).batch
    joined = driver.prefill(1, new, cached=batch)
    assert joined.batch is not None
    assert joined.batch.request_ids == (old.id, new.id)
    assert joined.batch.id == 0
    assert joined.timings.concat_ns is not None
    assert len(joined.generations) == 2
    driver.finish(joined.batch)
    expect_greedy(driver, old)
    expect_greedy(driver, new)


def test_decoding_two_batches_merges_them_under_the_first_id(driver: Driver) -> None:
    one, two = driver.request("Hello world", 6), driver.request("the stop is", 9)
    driver.prefill(3, one)
    driver.prefill(4, two)
    merged = driver.decode(4, 3).batch
    assert merged is not None
    assert (merged.id, merged.request_ids) == (4, (two.id, one.id))
    with pytest.raises(BatchNotFoundError):
        driver.decode(3)
    driver.finish(merged)
    expect_greedy(driver, one)
    expect_greedy(driver, two)


@pytest.mark.parametrize("chunk", [1, 7, 16, 63])
def test_a_cut_prompt_gives_the_text_of_the_uncut_one(driver: Driver, chunk: int) -> None:
    request = driver.request(LONG, 6, chunk_len=chunk)
    result = driver.prefill(0, request)
    assert result.generations == []
    steps = 1
    while not driver.results.get(request.id):
        assert result.batch is not None
        promised = result.batch.current_tokens
        result = driver.decode(0)
        steps += 1
        assert sum(driver.adapter.steps[-1].counts) == promised
    driver.finish(result.batch)
    expect_greedy(driver, request)
    length = len(driver.adapter.tokenizer.encode(LONG))
    assert steps == 1 + -(-(length - chunk) // 64)


def test_a_cut_prompt_goes_on_beside_newcomers_within_the_budget(driver: Driver) -> None:
    long = driver.request(LONG, 4, chunk_len=10)
    batch = driver.prefill(0, long).batch
    newcomers = []
    while batch is not None and long.id not in driver.results:
        room = 64 - batch.current_tokens
        text = "Hello world"[: max(room, 0)]
        if text:
            newcomers.append(driver.request(text, 3))
            batch = driver.prefill(len(newcomers), newcomers[-1], cached=batch).batch
        else:
            batch = driver.decode(batch.id).batch
        assert sum(driver.adapter.steps[-1].counts) <= 64
    driver.finish(batch)
    for request in [long, *newcomers]:
        expect_greedy(driver, request)


def test_several_cut_prompts_share_the_budget_newest_first(driver: Driver) -> None:
    requests = [driver.request(LONG, 2, chunk_len=4) for _ in range(3)]
    batch = driver.prefill(0, *requests).batch
    assert batch is not None
    assert batch.current_tokens == 64
    driver.decode(0)
    assert driver.adapter.steps[-1].counts == [1, 1, 62]
    driver.finish(batch)
    for request in requests:
        expect_greedy(driver, request)


def test_a_prompt_without_a_chunk_length_is_computed_to_its_end(tmp_path: Path) -> None:
    driver = Driver(ScriptedAdapter.in_folder(tmp_path), max_prefill=50)
    result = driver.prefill(0, driver.request("a" * 64, 1), driver.request("b" * 64, 1))
    assert result.batch is None
    assert len(result.generations) == 2


@pytest.mark.parametrize("keep", ["long", "short", "both"])
def test_filtering_inside_a_cut_prompt_leaves_the_others_alone(driver: Driver, keep: str) -> None:
    long, short = driver.request(LONG, 5, chunk_len=20), driver.request("the stop is", 9)
    batch = driver.prefill(0, short, long).batch
    assert batch is not None
    kept = {"long": [long], "short": [short], "both": [long, short]}[keep]
    filtered = driver.engine.filter(0, [r.id for r in kept])
    assert filtered.request_ids == tuple(r.id for r in kept)
    driver.finish(filtered)
    for request in kept:
        expect_greedy(driver, request)


def test_filtering_to_nothing_or_to_strangers_is_refused_and_keeps_the_batch(driver: Driver) -> None:
    requests = [driver.request("Hello", 4), driver.request("the", 4)]
    driver.prefill(0, *requests)
    for ids in ([], [99], [requests[0].id, 99], [requests[0].id] * 2):
        with pytest.raises(RequestError, match="batch 0"):
            driver.engine.filter(0, ids)
    with pytest.raises(BatchNotFoundError):
        driver.engine.filter(5, [0])
    driver.finish(driver.engine.filter(0, [requests[1].id, requests[0].id]))
    for request in requests:
        expect_greedy(driver, request)


def test_an_ended_request_is_never_fed_again(driver: Driver) -> None:
    short, long = driver.request("Hello", 2), driver.request("the stop", 9)
    batch = driver.prefill(0, short, long).batch
    batch = driver.decode(0).batch
    assert batch is not None
    assert batch.request_ids == (long.id,)
    held = {b * 16 + i for b in short.blocks for i in range(16)}
    driver.adapter.steps.clear()
    driver.finish(batch)
    assert not held & {slot for step in driver.adapter.steps for slot in step.slots}


def test_each_token_is_stored_in_its_slot_and_the_last_one_nowhere(driver: Driver) -> None:
    request = driver.request("a" * 50, 20)
    driver.adapter.steps.clear()
    driver.run(request)
    assert [slot for step in driver.adapter.steps for slot in step.slots] == list(request.slots)


def test_batch_zero_survives_the_liveness_request_and_strangers_clears(driver: Driver) -> None:
    health = Request(
        HEALTH_REQUEST_ID, "liveness", 1, SamplingParams(), StopRule(1),
        add_special_tokens=False, blocks=(0,), slots=(0,),
    )  # fmt: skip
    for _ in range(20):
        request = driver.request("Hello", 2)
        batch = driver.prefill(0, request).batch
        assert batch is not None
        driver.adapter.steps.clear()
        answer = driver.engine.prefill(HEALTH_REQUEST_ID, [health], None)
        assert answer.batch is None
        assert driver.adapter.steps[0].slots == [0]
        final = answer.generations[0].generated_text
        assert final is not None
        assert (final.finish_reason, final.generated_tokens) == (FinishReason.LENGTH, 1)
        driver.engine.clear(77)
        driver.finish(batch)
        expect_greedy(driver, request)
        driver.free += request.blocks


def test_the_liveness_request_ends_in_its_step_whatever_it_asks(driver: Driver) -> None:
    blocks, slots = (0,), tuple(range(16))
    alive = driver.request("liveness", 8, id=HEALTH_REQUEST_ID, truncate=1, blocks=[0], add_special_tokens=False)
    result = driver.prefill(HEALTH_REQUEST_ID, replace(alive, blocks=blocks, slots=slots))
    assert result.batch is None
    assert [len(g.tokens.ids) for g in result.generations] == [1]
    assert driver.results[HEALTH_REQUEST_ID].done


def test_clear_drops_one_batch_or_all(driver: Driver) -> None:
    for batch_id in range(3):
        driver.prefill(batch_id, driver.request("Hello", 4))
    driver.engine.clear(1)
    with pytest.raises(BatchNotFoundError, match="batch 1"):
        driver.decode(1)
    driver.decode(0)
    driver.engine.clear(None)
    for batch_id in (0, 2):
        with pytest.raises(BatchNotFoundError):
            driver.decode(batch_id)


@pytest.mark.parametrize("error", [RuntimeError("kernel"), ValueError("shape"), MemoryError()])
def test_a_failing_step_drops_its_batches_and_nothing_else(driver: Driver, error: Exception) -> None:
    bystander = driver.request("the stop is", 6)
    driver.prefill(8, bystander)
    driver.prefill(0, driver.request("Hello", 6))

    def fail(_: object) -> None:
        raise error

    driver.adapter.script.before_step = fail
    with pytest.raises(type(error)):
        driver.prefill(1, driver.request("world", 6), cached=driver.engine.filter(0, [1]))
    with pytest.raises(type(error)):
        driver.prefill(2, driver.request("world", 6))
    driver.adapter.script.before_step = None
    for batch_id in (0, 1, 2):
        with pytest.raises(BatchNotFoundError):
            driver.decode(batch_id)
    driver.finish(driver.decode(8).batch)
    expect_greedy(driver, bystander)


def test_an_unknown_id_among_known_ones_drops_them_all(driver: Driver) -> None:
    driver.prefill(0, driver.request("Hello", 4))
    with pytest.raises(BatchNotFoundError, match="batch 9"):
        driver.decode(0, 9)
    with pytest.raises(BatchNotFoundError):
        driver.decode(0)
    with pytest.raises(RequestError, match="no batch"):
        driver.decode()


def test_requests_without_blocks_run_one_batch_at_a_time(driver: Driver) -> None:
    bare = [Request(i, text, 50, SamplingParams(), StopRule(5)) for i, text in enumerate(["Hello world", "a" * 40])]
    batch = driver.prefill(0, *bare).batch
    assert batch is not None
    with pytest.raises(RequestError, match="one batch at a time"):
        driver.engine.prefill(1, [Request(5, "x", 50, SamplingParams(), StopRule(5))], None)
    driver.finish(driver.decode(0).batch)
    for request in bare:
        expect_greedy(driver, request)
    assert min(slot for step in driver.adapter.steps for slot in step.slots) >= 16
    huge = [Request(i, "a" * 200, 200, SamplingParams(), StopRule(50)) for i in range(1000)]
    with pytest.raises(ResourceError, match="without blocks"):
        driver.engine.prefill(0, huge, None)


def test_all_blocks_in_use_at_once(tmp_path: Path) -> None:
    driver = Driver(ScriptedAdapter.in_folder(tmp_path, max_position=128), max_prefill=2000, max_total=128)
    per_request = 8
    requests: list[Request] = []
    while len(driver.free) >= per_request:
        text = chr(97 + len(requests) % 26) * (60 + len(requests))
        requests.append(driver.request(text, 128 - len(driver.adapter.tokenizer.encode(text))))
    assert len(driver.free) < per_request
    driver.run(*requests)
    for request in requests:
        expect_greedy(driver, request)


def test_a_step_ahead_is_used_once_by_its_own_batch_and_claimed_by_nobody(tmp_path: Path) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    driver = Driver(adapter)
    runner = driver.engine._runner
    assert runner is not None
    runner._runs_ahead = True
    first = driver.request("Hello world", 8)
    batch = driver.prefill(0, first).batch
    assert batch is not None
    assert ahead_of(runner) is None, "a batch that has only been made has no plan to go on with"
    driver.decode(batch.id)
    steps = len(adapter.steps)
    ahead = ahead_of(runner)
    assert ahead is not None
    written = torch.tensor(adapter.steps[-1].slots)
    assert runner.guard.history(written).tolist() == [0], "written, and not to be claimed"
    driver.decode(batch.id)
    assert len(adapter.steps) == steps + 1, "the step that was ahead, and no other, was answered with"
    assert runner.guard.history(written).tolist() != [0]
    driver.engine.filter(batch.id, [first.id])
    second = driver.request("the stop is", 3)
    driver.prefill(second.id, second)
    assert ahead_of(runner) is None, "another call came: its logits are of no use any more"
    driver.finish(batch)
    expect_greedy(driver, first)


def test_who_goes_on_when_another_ends_has_the_step_that_was_launched_for_both(tmp_path: Path) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    adapter.takes_unread = True
    adapter.say("Hello world", "one two")
    driver = Driver(adapter)
    runner = driver.engine._runner
    assert runner is not None
    runner._runs_ahead = True
    ends, goes_on = driver.request("Hello world", 40), driver.request("the stop is", 12)
    batch = driver.prefill(0, ends, goes_on).batch
    assert batch is not None
    while batch.size == 2:
        batch = driver.decode(batch.id).batch
        assert batch is not None
    assert driver.results[ends.id].final.finish_reason == FinishReason.EOS_TOKEN
    assert adapter.steps[-1].counts == [1, 1], "launched before anybody knew that one of them ends"
    steps = len(adapter.steps)
    batch = driver.decode(batch.id).batch
    assert [step.counts for step in adapter.steps[steps:]] == [[1]], "only the step after it: its own was there"
    driver.finish(batch)
    expect_greedy(driver, goes_on)


def test_no_step_is_launched_for_a_token_without_a_place(tmp_path: Path) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    adapter.takes_unread = True
    driver = Driver(adapter)
    runner = driver.engine._runner
    assert runner is not None
    runner._runs_ahead = True
    request = driver.request("Hello world", 3)
    batch = driver.prefill(0, request).batch
    while batch is not None:
        batch = driver.decode(batch.id).batch
    prompt = len(adapter.tokenizer.encode("Hello world"))
    assert [step.counts for step in adapter.steps] == [[prompt], [1], [1]], "no step for the token that ends it"
    written = [slot for step in adapter.steps for slot in step.slots]
    assert len(set(written)) == len(written), "each token once"
    expect_greedy(driver, request)


def test_what_is_prepared_in_between_drops_the_step_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    driver = Driver(adapter)
    runner = driver.engine._runner
    assert runner is not None
    runner._runs_ahead = True
    request = driver.request("Hello world", 8)
    batch = driver.prefill(0, request).batch
    assert batch is not None
    driver.decode(batch.id)
    ahead = ahead_of(runner)
    assert ahead is not None
    monkeypatch.setattr(adapter, "go_on_preparing", lambda: bool(ahead.logits.zero_().numel()))
    assert driver.engine.go_on_preparing()
    driver.finish(batch)
    expect_greedy(driver, request)


def test_an_error_ahead_is_told_to_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    driver = Driver(adapter)
    runner = driver.engine._runner
    assert runner is not None
    batch = driver.prefill(0, driver.request("Hello world", 8)).batch
    assert batch is not None
    driver.decode(batch.id)
    runner._runs_ahead = True
    monkeypatch.setattr(adapter, "step", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        driver.decode(batch.id)
    monkeypatch.undo()
    batch = driver.prefill(1, driver.request("Hello world", 8)).batch
    assert batch is not None
    driver.decode(batch.id)
    monkeypatch.setattr(adapter, "step", broken)
    driver.decode(batch.id)
    with pytest.raises(RuntimeError, match="out of luck"):
        driver.decode(batch.id)


def broken(*args: object) -> object:
    raise RuntimeError("out of luck")


def ahead_of(runner: Runner) -> Ahead | None:
    return runner._ahead
