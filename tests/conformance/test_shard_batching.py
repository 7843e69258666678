"""Batches that grow, shrink, meet and are cut: lines 24 to 36 of the contract's checklist."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from oracles.greedy import GreedyOracle
from router_model import Ask, RouterModel, check_cached_batch
from shard_bench import MAX_PREFILL_TOKENS, Bench
from shard_client import attempt, neutral_parameters

from deepseek_tgi.pb import generate_pb2 as pb

PROMPTS = (
    "the cat sat on the mat",
    "a",
    "in the end there is only the sea, and the sea is wide",
    "0123456789 " * 4,
    "hello world",
)
LONG = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 5
"""More than five prefill budgets of tokens."""


def expected(bench: Bench, oracle: GreedyOracle, ask: Ask) -> list[int]:
    """What `transformers` says to the same prompt."""
    return oracle.greedy(bench.encode(ask.text, ask.add_special), ask.max_new)


def same(logprobs: list[float]) -> Any:
    """Bit-identical where the compiled kernels run, which sum in one order whatever the batch; close without them."""
    return logprobs if shutil.which("g++") else pytest.approx(logprobs, abs=1e-4)


def check(bench: Bench, oracle: GreedyOracle, router: RouterModel, asks: Sequence[Ask], first: int = 0) -> None:
    """Every request from `first` on said what `transformers` says."""
    for number, ask in enumerate(asks, first):
        assert router.outcomes[number].ids == expected(bench, oracle, ask), f"request {number}: {ask.text[:30]!r}"


def test_line_24_requests_that_end_in_one_step_leave_no_batch(shard: Bench, oracle: GreedyOracle) -> None:
    router = shard.router()
    asks = [Ask(text, 1) for text in PROMPTS[:2]]
    response = router.admit(*asks)
    assert len(response.generations) == 2
    assert not response.HasField("batch")
    check(shard, oracle, router, asks)


def test_line_25_unfinished_requests_come_back_in_a_batch(shard: Bench, oracle: GreedyOracle) -> None:
    router = shard.router()
    asks = [Ask(PROMPTS[0], 4), Ask(PROMPTS[1], 6)]
    response = router.admit(*asks)
    assert list(response.batch.request_ids) == [0, 1]
    assert response.batch.size == 2
    assert response.batch.max_tokens > 0
    assert response.total_ns >= response.forward_ns > 0
    router.finish()
    check(shard, oracle, router, asks)


def test_line_26_current_tokens_is_what_the_next_step_feeds(shard: Bench) -> None:
    router = shard.router()
    router.admit(Ask(LONG, 3, chunk_len=MAX_PREFILL_TOKENS))
    promises = 0
    while router.batch is not None:
        promised, mark = router.batch.current_tokens, shard.mark()
        router.step()
        assert sum(len(s["ids"]) for s in shard.steps(mark)) == promised
        promises += 1
    assert promises > 5


def test_line_26_current_tokens_counts_newcomers_and_the_running(shard: Bench) -> None:
    router = shard.router()
    router.admit(*[Ask(text, 9) for text in PROMPTS[:3]])
    assert router.batch is not None
    assert router.batch.current_tokens == 3
    router.admit(Ask(LONG, 3, chunk_len=20))
    while router.batch is not None:
        promised, mark = router.batch.current_tokens, shard.mark()
        assert promised <= MAX_PREFILL_TOKENS
        router.step()
        assert len(shard.fed(mark)) == promised


def test_line_27_decode_of_two_batches_returns_one_with_both(shard: Bench, oracle: GreedyOracle) -> None:
    router = shard.router()
    asks = [Ask(text, 6) for text in PROMPTS]
    first = shard.client.prefill([router.build(a) for a in asks[:2]], 0)
    second = shard.client.prefill([router.build(a) for a in asks[2:]], 1)
    router._absorb(pb.PrefillResponse(generations=[*first.generations, *second.generations], batch=pair(first, second)))
    joined = shard.client.decode([first.batch, second.batch])
    assert list(joined.batch.request_ids) == [0, 1, 2, 3, 4]
    router._absorb(joined)
    _, error = attempt(lambda: shard.client.decode([second.batch]))
    assert error is not None or joined.batch.id == second.batch.id, "the joined batches must be gone"
    router.finish()
    check(shard, oracle, router, asks)


def pair(first: pb.PrefillResponse, second: pb.PrefillResponse) -> pb.CachedBatch:
    """The two batches as the router counts them."""
    ids = [*first.batch.request_ids, *second.batch.request_ids]
    return pb.CachedBatch(id=first.batch.id, request_ids=ids, size=len(ids), max_tokens=1, current_tokens=1)


def test_line_28_prefill_with_a_cached_batch_advances_both(shard: Bench, oracle: GreedyOracle) -> None:
    router = shard.router()
    asks = [Ask(text, 7) for text in PROMPTS]
    for i, ask in enumerate(asks):
        response = router.admit(ask)
        assert sorted(g.request_id for g in response.generations) == list(range(i + 1))
    router.finish()
    check(shard, oracle, router, asks)


def test_line_29_chunked_prompt_goes_on_by_decode_alone(shard: Bench, oracle: GreedyOracle) -> None:
    router = shard.router()
    ask = Ask(PROMPTS[2], 5, chunk_len=10)
    mark = shard.mark()
    response = router.admit(ask)
    assert len(response.generations) == 0
    assert list(response.batch.request_ids) == [0]
    assert len(shard.fed(mark)) == 10
    router.finish()
    check(shard, oracle, router, [ask])


@pytest.mark.parametrize("neighbours", [0, 1, 3])
def test_line_30_prompt_of_five_budgets_goes_on_while_others_join(
    shard: Bench, oracle: GreedyOracle, neighbours: int
) -> None:
    router = shard.router()
    asks = [Ask(LONG, 5, chunk_len=MAX_PREFILL_TOKENS)]
    assert len(shard.encode(LONG)) > 5 * MAX_PREFILL_TOKENS
    mark = shard.mark()
    router.admit(asks[0])
    for text in PROMPTS[:neighbours]:
        # What is left of the budget beside the running prompt, one token at least, as the router cuts it.
        assert router.batch is not None
        room = max(1, MAX_PREFILL_TOKENS - router.batch.current_tokens)
        length = len(shard.encode(text))
        asks.append(Ask(text, 8, chunk_len=room if room < length else None))
        router.admit(asks[-1])
    router.finish()
    check(shard, oracle, router, asks)
    assert max(len(s["ids"]) for s in shard.steps(mark)) <= MAX_PREFILL_TOKENS + len(asks)


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 33])
def test_line_31_chunked_text_equals_the_unchunked(any_cache: Bench, chunk: int) -> None:
    router = any_cache.router()
    whole = router.run(Ask(PROMPTS[2], 12))[0]
    cut = router.run(Ask(PROMPTS[2], 12, chunk_len=chunk))[0]
    assert cut.text == whole.text
    assert cut.ids == whole.ids
    assert cut.logprobs == same(whole.logprobs)


def test_line_32_a_finished_request_is_silent_and_writes_nothing(shard: Bench) -> None:
    router = shard.router()
    requests = [router.build(Ask(PROMPTS[0], 2)), router.build(Ask(PROMPTS[2], 9))]
    response: Any = shard.client.prefill(requests, 0)
    response = shard.client.decode([response.batch])
    ended = [g.request_id for g in response.generations if g.HasField("generated_text")]
    assert ended == [0]
    mark = shard.mark()
    for _ in range(4):
        response = shard.client.decode([response.batch])
        assert [g.request_id for g in response.generations] == [1]
    written = {slot for _, _, slot in shard.fed(mark) if slot >= 0}
    assert not written & set(requests[0].slots)
    assert written <= set(requests[1].slots)
    shard.client.clear()


@pytest.mark.parametrize("dropped", [[0], [1], [2], [0, 1], [1, 2]], ids=str)
def test_line_33_filter_amid_a_chunked_prefill_leaves_the_others_alone(
    shard: Bench, oracle: GreedyOracle, dropped: list[int]
) -> None:
    router = shard.router()
    asks = [Ask(PROMPTS[0], 30), Ask(LONG, 4, chunk_len=30), Ask(PROMPTS[4], 30)]
    router.admit(asks[0])
    router.admit(asks[1])  # it will be unfinished for some steps yet
    router.admit(asks[2])
    router.cancel(*dropped)
    router.finish()
    for number in {0, 1, 2} - set(dropped):
        assert router.outcomes[number].ids == expected(shard, oracle, asks[number])


@pytest.mark.parametrize("prompt", [0, 2, 3])
def test_line_34_greedy_output_does_not_depend_on_company(any_cache: Bench, prompt: int) -> None:
    alone = any_cache.router().run(Ask(PROMPTS[prompt], 16))[0]
    together = any_cache.router(seed=1)
    others = [Ask(t, 5 + 3 * i) for i, t in enumerate(PROMPTS)]
    batched = together.run(Ask(PROMPTS[prompt], 16), *others)[0]
    late = any_cache.router(seed=2)
    late.admit(*others)
    late.step()
    late.admit(Ask(PROMPTS[prompt], 16))
    late.step()
    late.cancel(2, 0)
    late.admit(Ask("still another one that comes and goes", 2))
    late.finish()
    joined = late.outcomes[len(others)]
    for outcome in (batched, joined):
        assert outcome.ids == alone.ids
        assert outcome.logprobs == same(alone.logprobs)
        assert outcome.text == alone.text


def test_line_34_exact_cache_gives_the_reference_tokens(shard: Bench, oracle: GreedyOracle) -> None:
    router = shard.router()
    asks = [Ask(text, 24) for text in PROMPTS]
    router.run(*asks)
    check(shard, oracle, router, asks)


NUM_SEQUENCES = 1000
MEMORY_SLACK_BYTES = 24 * 2**20
"""Allocator noise of a Python process; one leaked batch a sequence would be hundreds of requests and cached lists."""


def test_line_35_a_thousand_random_sequences_leak_nothing(scripted: Bench) -> None:
    rng = random.Random(35)
    used: set[int] = set()
    early = 0
    for number in range(NUM_SEQUENCES):
        router = scripted.router(seed=number, first_id=1000 * number)
        random_sequence(scripted, router, rng)
        used.add(router.batch.id if router.batch is not None else 1000 * number)
        if router.batch is not None:
            scripted.client.clear(router.batch.id)
        if number == NUM_SEQUENCES // 4:
            early = scripted.shard.rss_bytes()
    assert scripted.shard.rss_bytes() - early < MEMORY_SLACK_BYTES
    for batch_id in rng.sample(sorted(used), 50):
        handle = pb.CachedBatch(id=batch_id)
        _, error = attempt(partial(scripted.client.decode, [handle]))
        assert error is not None, f"batch {batch_id} is still held"


def random_sequence(bench: Bench, router: RouterModel, rng: random.Random) -> None:
    """A few admissions, steps and cancels; what ended said what the script's arithmetic says."""
    asks: dict[int, Ask] = {}
    base = router._next_request
    for _ in range(rng.randint(1, 6)):
        if router.batch is None or rng.random() < 0.4:
            new = [random_ask(rng) for _ in range(rng.randint(1, 3))]
            asks |= dict(enumerate(new, base + len(asks)))
            router.admit(*new)
        elif rng.random() < 0.3 and router.live:
            router.cancel(*rng.sample(sorted(router.live), rng.randint(1, len(router.live))))
        else:
            router.step()
    if rng.random() < 0.3:
        router.finish()
    for number, outcome in router.outcomes.items():
        prompt = bench.encode(asks[number].text)
        assert outcome.ids == bench.script.greedy(prompt, len(outcome.ids))


def random_ask(rng: random.Random) -> Ask:
    """A prompt of its own, sometimes cut."""
    text = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 40)))
    cut = rng.randint(1, 3) if rng.random() < 0.2 and len(text) > 4 else None
    return Ask(text, rng.randint(1, 6), chunk_len=cut)


def test_line_36_requests_without_blocks_work_one_batch_at_a_time(shard: Bench, oracle: GreedyOracle) -> None:
    for _ in range(2):
        requests = [
            pb.Request(
                id=i,
                inputs=text,
                input_chunks=pb.Input(chunks=[pb.InputChunk(text=text)]),
                truncate=400,
                add_special_tokens=True,
                parameters=neutral_parameters(),
                stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=20, ignore_eos_token=True),
            )
            for i, text in enumerate(PROMPTS)
        ]
        response: Any = shard.client.prefill(requests, 0)
        said: dict[int, list[int]] = {}
        while True:
            for generation in response.generations:
                said.setdefault(generation.request_id, []).extend(generation.tokens.ids)
            if not response.HasField("batch"):
                break
            check_cached_batch(response.batch)
            response = shard.client.decode([response.batch])
        for i, text in enumerate(PROMPTS):
            assert said[i] == oracle.greedy(shard.encode(text), 20)
