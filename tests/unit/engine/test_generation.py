"""What each Generation carries: texts, endings, logprobs, alternatives, seeds, failures."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import Driver
from scripted import ScriptedAdapter

from deepseek_tgi.core import FinishReason, GrammarType, SamplingParams, StopRule
from deepseek_tgi.engine.config import MAX_PROMPT_LOGIT_ROWS
from deepseek_tgi.engine.engine import EngineConfig
from deepseek_tgi.errors import GenerationError, RequestError

DRAWN = SamplingParams(temperature=1.8, top_k=40, seed=42)


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def driver(tmp_path: Path, counts: Counter[str]) -> Driver:
    return Driver(ScriptedAdapter.in_folder(tmp_path), counter=lambda name, by: counts.update({name: by}))


def test_characters_split_over_tokens_stream_whole(driver: Driver) -> None:
    driver.adapter.say("Hello", "é你😀 the")
    (found,) = driver.run(driver.request("Hello", 40))
    assert found.final.text == "é你😀 the"
    assert "".join(found.pieces) == "é你😀 the</s>"
    assert not any("\ufffd" in piece for piece in found.pieces)
    assert found.reason is FinishReason.EOS_TOKEN
    for generation in found.generations:
        tokens = generation.tokens
        assert len(tokens.ids) == len(tokens.logprobs) == len(tokens.texts) == len(tokens.is_special) == 1
    assert [g.tokens.is_special[0] for g in found.generations] == [False] * (len(found.ids) - 1) + [True]


def test_a_stop_text_ends_it_and_stays_in_the_text(driver: Driver) -> None:
    driver.adapter.say("Hello", "one two stop the world")
    (found,) = driver.run(driver.request("Hello", 60, stop_sequences=("two s",)))
    assert found.reason is FinishReason.STOP_SEQUENCE
    assert found.final.text.startswith("one two s")
    assert found.final.generated_tokens == len(found.ids)


def test_length_wins_on_the_last_token_and_ignoring_the_end_goes_on(driver: Driver) -> None:
    driver.adapter.say("Hello", "x")
    eos = driver.adapter.tokenizer.eos_token_id
    (at_limit,) = driver.run(driver.request("Hello", 2))
    assert (at_limit.ids[-1], at_limit.reason) == (eos, FinishReason.LENGTH)
    (ignoring,) = driver.run(driver.request("Hello", stop=StopRule(5, ignore_eos=True)))
    assert ignoring.ids[1:] == [eos] * 4


def test_greedy_logprobs_are_the_models_and_no_seed_is_reported(driver: Driver) -> None:
    (found,) = driver.run(driver.request("the stop is", 4, sampling=SamplingParams(seed=3)))
    history = driver.adapter.tokenizer.encode("the stop is")
    for token_id, logprob in zip(found.ids, found.logprobs, strict=True):
        assert logprob == pytest.approx(float(driver.adapter.logits_after(history).log_softmax(-1)[token_id]), abs=1e-5)
        history.append(token_id)
    assert found.final.seed is None


def test_equal_seeds_give_equal_text_whatever_runs_beside_them(driver: Driver) -> None:
    alone = driver.run(driver.request("Hello world", 12, sampling=DRAWN))[0]
    assert alone.final.seed == 42
    assert driver.run(driver.request("Hello world", 12, sampling=replace(DRAWN, seed=43)))[0].ids != alone.ids
    neighbour = driver.request("the stop", 5, sampling=SamplingParams(do_sample=True, seed=9))
    same = driver.request("Hello world", 12, sampling=DRAWN)
    driver.run(neighbour, same)
    assert driver.results[same.id].ids == alone.ids
    late = driver.request("Hello world", 12, sampling=DRAWN)
    batch = driver.prefill(50, driver.request("one two", 9, sampling=DRAWN)).batch
    batch = driver.prefill(51, late, cached=batch).batch
    driver.decode(50)
    driver.finish(driver.engine.filter(50, [late.id]))
    assert driver.results[late.id].ids == alone.ids


def test_penalties_follow_the_request_through_filter_and_merge(driver: Driver) -> None:
    params = SamplingParams(repetition_penalty=3.0, frequency_penalty=2.0)
    alone = driver.run(driver.request("aaa", 14, sampling=params))[0]
    moved, other = driver.request("aaa", 14, sampling=params), driver.request("bbb", 14, sampling=params)
    batch = driver.prefill(1, driver.request("x", 3), moved).batch
    batch = driver.prefill(2, other, cached=batch).batch
    driver.decode(1)
    driver.finish(driver.engine.filter(1, [other.id, moved.id]))
    assert driver.results[moved.id].ids == alone.ids


def test_a_grammar_holds_through_batching_and_filtering(driver: Driver) -> None:
    params = SamplingParams(grammar="[0-9]{4}-[a-c]{3}", grammar_type=GrammarType.REGEX, do_sample=True, seed=1)
    bound, free = driver.request("Hello", 30, sampling=params), driver.request("Hello", 10)
    batch = driver.prefill(0, free, bound).batch
    driver.decode(0)
    driver.finish(driver.engine.filter(0, [bound.id]))
    found = driver.results[bound.id]
    assert re.fullmatch("[0-9]{4}-[a-c]{3}", found.final.text)
    assert found.reason is FinishReason.EOS_TOKEN
    assert batch is not None


def test_alternatives_come_with_each_token_that_asks(driver: Driver) -> None:
    requests = [driver.request("Hello", 3, top_n_tokens=n) for n in (0, 1, 3)]
    driver.run(*requests)
    for request in requests:
        for generation in driver.results[request.id].generations:
            if not request.top_n_tokens:
                assert generation.top_tokens is None
                continue
            assert generation.top_tokens is not None
            (top,) = generation.top_tokens
            assert len(top.ids) == len(top.texts) == len(top.is_special) == request.top_n_tokens
            assert top.logprobs == sorted(top.logprobs, reverse=True)
            assert top.ids[0] == generation.tokens.ids[0]
            assert top.logprobs[0] == generation.tokens.logprobs[0]


@pytest.mark.parametrize("chunk", [None, 5])
def test_prompt_logprobs_come_once_when_they_are_enabled(tmp_path: Path, chunk: int | None) -> None:
    driver = Driver(ScriptedAdapter.in_folder(tmp_path), EngineConfig(request_logprobs=True), max_prefill=400)
    text = "the stop " * 60
    length = len(driver.adapter.tokenizer.encode(text, truncate=240))
    asking = driver.request(text, 3, prefill_logprobs=True, truncate=240, chunk_len=chunk)
    driver.run(asking, driver.request("Hello", 3))
    generations = driver.results[asking.id].generations
    assert [g.prefill_tokens is not None for g in generations] == [True, False, False]
    prompt = generations[0].prefill_tokens
    assert prompt is not None
    assert length == len(prompt.ids) == len(prompt.logprobs) == len(prompt.texts)
    assert prompt.is_special == []
    assert math.isnan(prompt.logprobs[0])
    for place in range(1, length):
        wanted = driver.adapter.logits_after(prompt.ids[:place]).log_softmax(-1)[prompt.ids[place]]
        assert prompt.logprobs[place] == pytest.approx(float(wanted), abs=1e-5)
    assert prompt.texts == [driver.adapter.tokenizer.decode([i]) for i in prompt.ids]


def test_scoring_long_prompts_never_asks_for_all_logits_at_once(tmp_path: Path) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path, max_position=2000)
    driver = Driver(adapter, EngineConfig(request_logprobs=True), max_prefill=1500, max_total=2000)
    requests = [driver.request(c * 600, 2, prefill_logprobs=True) for c in "ab"]
    driver.run(*requests)
    assert max(step.num_logit_rows for step in adapter.steps) <= MAX_PROMPT_LOGIT_ROWS + len(requests)
    for request in requests:
        prompt = driver.results[request.id].generations[0].prefill_tokens
        assert prompt is not None
        assert len(prompt.logprobs) == 600


def test_prompt_logprobs_that_are_not_enabled_are_ignored(driver: Driver) -> None:
    (found,) = driver.run(driver.request("Hello", 2, prefill_logprobs=True))
    assert all(g.prefill_tokens is None for g in found.generations)


def test_only_its_rank_reports_a_request(tmp_path: Path) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    reported: list[list[int]] = []
    for rank in range(2):
        driver = Driver(adapter, EngineConfig(rank=rank, world_size=2))
        result = driver.prefill(0, *(driver.request("Hello", 3) for _ in range(4)))
        reported.append([g.request_id for g in result.generations])
        assert result.batch is not None
        assert result.batch.size == 4
    assert reported == [[0, 2], [1, 3]]


def poison(driver: Driver, prompt: str, after: int) -> None:
    """NaN in the logits of `prompt`'s continuation from its token number `after` on."""
    start = driver.adapter.tokenizer.encode(prompt)

    def edit(history: list[int], logits: torch.Tensor) -> None:
        if history[: len(start)] == start and len(history) >= len(start) + after:
            logits[5] = float("nan")

    driver.adapter.script.edit_logits = edit


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("params", [SamplingParams(), DRAWN], ids=["greedy", "drawn"])
def test_logits_that_are_not_finite_end_that_request_alone(
    driver: Driver, counts: Counter[str], after: int, params: SamplingParams
) -> None:
    bad, good = driver.request("the stop", 9, sampling=params), driver.request("Hello", 9)
    poison(driver, "the stop", after)
    driver.run(bad, good)
    assert driver.results[good.id].ids == driver.adapter.greedy("Hello", 9)
    ended = driver.results[bad.id]
    assert len(ended.ids) == after + 1
    assert math.isnan(ended.logprobs[-1])
    assert ended.final.generated_tokens == after + 1
    assert ended.reason is FinishReason.EOS_TOKEN
    assert counts["requests_failed"] == 1


def test_a_failure_with_no_neighbour_fails_its_call(driver: Driver, counts: Counter[str]) -> None:
    poison(driver, "the stop", 2)
    batch = driver.prefill(0, driver.request("the stop", 9)).batch
    driver.decode(0)
    with pytest.raises(GenerationError, match="after 2 tokens: the model's logits are not finite"):
        driver.decode(0)
    assert counts["requests_failed"] == 1
    assert driver.run(driver.request("Hello", 2))[0].done
    assert batch is not None


BROKEN = {
    "grammar": ({"sampling": SamplingParams(grammar="(", grammar_type=GrammarType.REGEX)}, "grammar"),
    "slots": ({"slots": (16, 17)}, "2 slots, expected at least"),
    "slot order": ({"slots": (17, 16, *range(18, 40))}, "slot 0 is 17, expected 16"),
    "block 0": ({"blocks": (0, 1), "slots": tuple(range(20))}, "blocks 0 to 1, expected 1 to"),
    "block range": ({"blocks": (1, 10**6), "slots": tuple(range(16, 36))}, "1000000, expected 1 to"),
    "block twice": ({"blocks": (1, 1), "slots": (*range(16, 32), *range(16, 20))}, "block 1 appears twice"),
    "block count": ({"blocks": (1,), "slots": tuple(range(16, 36))}, "20 slots do not fit in 1 blocks of 16"),
    "positions": ({"stop": StopRule(600)}, "positions, the model has 512"),
    "text": ({"text": "ab\ud800"}, "surrogate"),
    "empty": ({"text": ""}, "no tokens"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_request_that_cannot_run_fails_alone_or_ends_beside_others(
    driver: Driver, counts: Counter[str], name: str
) -> None:
    changes, words = BROKEN[name]
    broken = replace(driver.request("Hello wor", 9, blocks=[1, 2]), **changes)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=re.escape(words)):
        driver.prefill(0, broken)
    good, running = driver.request("the stop", 6), driver.request("one two", 9)
    batch = driver.prefill(1, running).batch
    driver.finish(driver.prefill(2, broken, good, cached=batch).batch)
    for request, count in ((good, 6), (running, 9)):
        assert driver.results[request.id].ids == driver.adapter.greedy(request.text, count)
    ended = driver.results[broken.id]
    assert (len(ended.ids), ended.final.text, ended.reason) == (1, "", FinishReason.EOS_TOKEN)
    assert counts["requests_failed"] == 2


def test_a_token_that_the_model_has_no_row_for_ends_its_request_alone(tmp_path: Path) -> None:
    adapter = ScriptedAdapter.in_folder(tmp_path)
    (beyond,) = adapter.tokenizer.encode(" o")
    adapter.have_fewer_ids(beyond)
    driver = Driver(adapter)
    bad, good = driver.request(" o", 5), driver.request("Hello", 5)
    with pytest.raises(RequestError, match=f"token {beyond}, the model knows 0 to {beyond - 1}"):
        driver.prefill(0, bad)
    driver.finish(driver.prefill(1, bad, good).batch)
    assert driver.results[good.id].ids == adapter.greedy("Hello", 5)
    assert driver.results[bad.id].ids == [min(adapter.eos_token_ids)]


def test_lots_of_wrong_requests_at_once_leave_no_batch(driver: Driver) -> None:
    bad = [driver.request("x", 5, sampling=SamplingParams(grammar="(", grammar_type=GrammarType.REGEX)) for _ in "ab"]
    result = driver.prefill(0, *bad)
    assert result.batch is None
    assert len(result.generations) == 2


def test_timings_add_up(driver: Driver) -> None:
    driver.adapter.script.before_step = lambda _: time.sleep(0.01)
    timings = driver.prefill(0, driver.request("Hello", 2)).timings
    assert 10_000_000 <= timings.forward_ns < timings.total_ns
    assert timings.forward_ns + timings.decode_ns <= timings.total_ns
    assert timings.concat_ns is None
