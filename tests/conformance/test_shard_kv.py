"""Where keys and values lie and who may read them: lines 37 to 45 of the contract's checklist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.greedy import GreedyOracle
from router_model import Ask, RouterModel
from shard_bench import MAX_INPUT_TOKENS, MAX_PREFILL_TOKENS, MAX_TOTAL_TOKENS, Bench

SENTENCE = "It was the best of times, it was the worst of times, it was the age of wisdom"
OTHER = "Call me Ishmael. Some years ago - never mind how long precisely - having little"


def prompt_of(bench: Bench, num_blocks: int, extra: int = 0, start: str = SENTENCE) -> str:
    """A text of exactly `num_blocks` blocks and `extra` tokens, BOS counted."""
    length = num_blocks * bench.info.block_size + extra
    text = (start + " ") * (length // 20 + 1)
    while len(bench.encode(text)) > length:
        text = text[:-1]
    assert len(bench.encode(text)) == length
    return text


def cold(bench: Bench, ask: Ask) -> list[int]:
    """What the shard says without any claim."""
    bench.client.clear()
    return bench.router(seed=99).run(Ask(ask.text, ask.max_new))[0].ids


def leave_prefix(router: RouterModel, text: str, num_blocks: int, max_new: int = 2) -> list[int]:
    """Run a request to its end and keep its first blocks, as the router's prefix cache does."""
    outcome = router.run(Ask(text, max_new))[0]
    blocks = outcome.blocks[:num_blocks]
    router.book.claim(blocks)
    return blocks


def test_line_37_token_p_is_stored_at_slot_p(shard: Bench, oracle: GreedyOracle) -> None:
    router = shard.router(seed=37)
    mark = shard.mark()
    text = prompt_of(shard, 3, 5)
    outcome = router.run(Ask(text, 20))[0]
    assert outcome.blocks != sorted(outcome.blocks), "the test wants blocks out of order"
    history = [*shard.encode(text), *outcome.ids]
    fed = shard.fed(mark)
    assert [position for _, position, _ in fed] == list(range(len(history) - 1)), "the last token is never stored"
    assert [token for token, _, _ in fed] == history[:-1]
    assert [slot for _, _, slot in fed] == outcome.slots
    wanted = oracle.keys(history[:-1])
    for step in shard.steps(mark):
        for position, keys in zip(step["positions"], step["keys"], strict=False):
            torch.testing.assert_close(torch.tensor(keys), wanted[position], rtol=1e-3, atol=1e-3)


def test_line_38_block_zero_is_never_written_for_a_request(any_cache: Bench) -> None:
    mark = any_cache.mark()
    router = any_cache.router(seed=38)
    router.admit(Ask(SENTENCE, 4), Ask("b", 1), Ask(OTHER, 3, chunk_len=7))
    any_cache.client.health_prefill()
    router.finish()
    slots = [slot for _, _, slot in any_cache.fed(mark)]
    assert sum(0 <= s < any_cache.info.block_size for s in slots) == 1, "only the health request's one token"


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_line_39_claimed_blocks_are_reused_and_only_the_rest_is_computed(any_cache: Bench, num_blocks: int) -> None:
    text = prompt_of(any_cache, 3, 6)
    expected = cold(any_cache, Ask(text, 12))
    router = any_cache.router(seed=39)
    shared = leave_prefix(router, text, num_blocks)
    mark = any_cache.mark()
    claim = num_blocks * any_cache.info.block_size
    again = router.run(Ask(text, 12, cache_len=claim, shared=shared))[0]
    assert again.ids == expected
    assert len(any_cache.steps(mark)[0]["ids"]) == len(any_cache.encode(text)) - claim
    assert not {slot for _, _, slot in any_cache.fed(mark)} & set(again.slots[:claim])


def test_line_39_a_prompt_that_shares_only_its_beginning_reuses_only_that(any_cache: Bench) -> None:
    size = any_cache.info.block_size
    first = prompt_of(any_cache, 3, 1)
    ids = any_cache.encode(first)
    second = any_cache.tokenizer.decode(ids[1 : 2 * size]) + " but not this"
    assert any_cache.encode(second)[: 2 * size] == ids[: 2 * size]
    expected = cold(any_cache, Ask(second, 10))
    router = any_cache.router(seed=40)
    shared = leave_prefix(router, first, 2)
    mark = any_cache.mark()
    assert router.run(Ask(second, 10, cache_len=2 * size, shared=shared))[0].ids == expected
    assert len(any_cache.steps(mark)[0]["ids"]) == len(any_cache.encode(second)) - 2 * size


def test_line_39_prompt_logprobs_tell_what_came_from_the_cache(shard: Bench) -> None:
    text = prompt_of(shard, 2, 4)
    router = shard.router(seed=41)
    shared = leave_prefix(router, text, 1)
    claim = shard.info.block_size
    outcome = router.run(Ask(text, 2, cache_len=claim, shared=shared, prefill_logprobs=True))[0]
    assert outcome.prefill is not None
    known = [value == value for value in outcome.prefill.logprobs]
    assert known[0] is False
    assert all(known[claim + 1 :])
    assert not any(known[:claim]) or all(known[1:]), "either the claim was used (NaN) or everything was computed"


def test_line_40_full_hit_beside_a_reader_changes_no_byte(any_cache: Bench) -> None:
    full_hit_beside_a_reader(any_cache)


def test_line_40_holds_without_compiled_kernels(portable: Bench) -> None:
    full_hit_beside_a_reader(portable)


def full_hit_beside_a_reader(any_cache: Bench) -> None:
    text = prompt_of(any_cache, 2)
    length = len(any_cache.encode(text))
    expected = cold(any_cache, Ask(text, 20))
    router = any_cache.router(seed=42)
    start = any_cache.mark()
    router.admit(Ask(text, 20))
    reader = router.outcomes[0]
    router.step()
    before = any_cache.stored(start)
    shared = reader.blocks[:2]
    mark = any_cache.mark()
    router.admit(Ask(text, 20, cache_len=length - 1, shared=shared))
    fed = [position for _, position, _ in any_cache.fed(mark)]
    assert fed.count(length - 1) == 1, "the last prompt token is computed again, and only it"
    assert len(fed) == 2
    router.finish()
    after = any_cache.stored(start)
    assert {s: after[s] for s in reader.slots[:length]} == {s: before[s] for s in reader.slots[:length]}
    assert reader.ids == expected
    assert router.outcomes[1].ids == expected


@pytest.mark.parametrize("claim", ["never written", "another prompt", "half right", "one token off", "cut short"])
@pytest.mark.parametrize("chunk_len", [None, 9])
def test_line_41_a_false_claim_still_gives_the_right_output(
    any_cache: Bench, claim: str, chunk_len: int | None
) -> None:
    size = any_cache.info.block_size
    text = prompt_of(any_cache, 3, 4)
    expected = cold(any_cache, Ask(text, 12))
    router = any_cache.router(seed=43)
    if claim == "never written":
        shared = router.book.take(3 * size)
        router.run(Ask(OTHER, 2))
    elif claim == "another prompt":
        shared = leave_prefix(router, prompt_of(any_cache, 3, 4, OTHER), 3)
    elif claim == "half right":
        shared = leave_prefix(router, any_cache.tokenizer.decode(any_cache.encode(text)[1 : size + 5]) + OTHER, 3)
    elif claim == "one token off":
        shared = leave_prefix(router, "I" + text, 3)
    else:
        router.admit(Ask(text, 4, chunk_len=size + 3))
        router.cancel(0)
        shared = router.outcomes[0].blocks[:3]
        router.book.claim(shared)
    outcome = router.run(Ask(text, 12, cache_len=3 * size, shared=shared, chunk_len=4 if chunk_len else None))[0]
    assert outcome.ids == expected


def test_line_41_blocks_overwritten_by_a_failed_step_are_not_believed(shard: Bench) -> None:
    size = shard.info.block_size
    text = prompt_of(shard, 2, 3)
    expected = cold(shard, Ask(text, 6))
    router = shard.router(seed=44)
    shared = leave_prefix(router, text, 2)
    shard.order(error="RuntimeError", message="written, then lost", late=True)
    with pytest.raises(Exception, match="written, then lost"):
        router.admit(Ask(prompt_of(shard, 2, 3, OTHER), 2, shared=shared))
    fresh = shard.router(seed=45)
    fresh.book.claim(shared)
    assert fresh.run(Ask(text, 6, cache_len=2 * size, shared=shared))[0].ids == expected


def test_line_41_blocks_of_a_step_that_failed_early_are_not_believed(shard: Bench) -> None:
    size = shard.info.block_size
    text = prompt_of(shard, 2, 3)
    expected = cold(shard, Ask(text, 6))
    router = shard.router(seed=44)
    request = router.build(Ask(text, 2))
    shard.order(error="RuntimeError", message="nothing was written")
    with pytest.raises(Exception, match="nothing was written"):
        shard.client.prefill([request], 0)
    shared = list(request.blocks[:2])
    fresh = shard.router(seed=45)
    fresh.book.claim(shared)
    assert fresh.run(Ask(text, 6, cache_len=2 * size, shared=shared))[0].ids == expected


def test_line_42_blocks_given_on_at_once_disturb_nobody(any_cache: Bench) -> None:
    asks = [Ask(SENTENCE, 3), Ask(OTHER, 14), Ask("a third one that takes over " * 3, 9)]
    expected = [cold(any_cache, ask) for ask in asks]
    any_cache.client.clear()
    router = any_cache.router(seed=46)
    router.admit(*asks[:2])
    while router.outcomes[0].final is None:
        router.step()
    inherited = router.outcomes[0].blocks
    router.book.claim(inherited)
    router.admit(Ask(asks[2].text, asks[2].max_new, shared=inherited[:4]))
    router.finish()
    assert [router.outcomes[i].ids for i in range(3)] == expected


def test_line_42_an_unfiltered_finished_request_leaves_its_old_blocks_alone(any_cache: Bench) -> None:
    # The first two fit one prefill budget together, so that the first ends in the first step.
    asks = [Ask(SENTENCE[:25], 1), Ask(OTHER[:25], 14), Ask("a third one that takes over " * 3, 9)]
    expected = [cold(any_cache, ask) for ask in asks]
    any_cache.client.clear()
    router = any_cache.router(seed=47)
    requests = [router.build(ask) for ask in asks[:2]]
    response: Any = any_cache.client.prefill(requests, 0)
    said = {g.request_id: list(g.tokens.ids) for g in response.generations}
    assert len(said) == 2
    router.book.give(requests[0].blocks)
    router.book.claim(requests[0].blocks)
    third = router.build(Ask(asks[2].text, asks[2].max_new, shared=list(requests[0].blocks)))
    response = any_cache.client.prefill([third], 1, response.batch)
    while True:
        for generation in response.generations:
            said.setdefault(generation.request_id, []).extend(generation.tokens.ids)
        if not response.HasField("batch"):
            break
        response = any_cache.client.decode([response.batch])
    assert [said[i] for i in range(3)] == expected


def test_line_43_and_44_every_block_in_use_at_once(any_cache: Bench) -> None:
    size = any_cache.info.block_size
    prompt_blocks = 24  # short enough that the last request comes before the first has ended
    full = Ask(prompt_of(any_cache, prompt_blocks), MAX_TOTAL_TOKENS - prompt_blocks * size)
    expected = cold(any_cache, full)
    assert len(expected) == full.max_new
    router = any_cache.router(seed=48)
    each = -(-(MAX_TOTAL_TOKENS - 1) // size)
    count, left = divmod(any_cache.num_blocks - 1, each)
    rest = Ask(prompt_of(any_cache, 4), (left - 4) * size + 1)
    before = any_cache.shard.rss_bytes()
    router.serve([full] * count + [rest], MAX_PREFILL_TOKENS)
    assert router.book.fewest_free == 0, "the test did not fill the pool"
    assert all(router.outcomes[i].ids == expected for i in range(count))
    assert len(router.outcomes[count].ids) == rest.max_new
    assert any_cache.shard.rss_bytes() - before < 100 * 2**20


def test_line_43_the_longest_prompt_works(shard: Bench, oracle: GreedyOracle) -> None:
    ask = Ask(prompt_of(shard, MAX_INPUT_TOKENS // shard.info.block_size), 3)
    router = shard.router(seed=50)
    router.serve([ask], MAX_PREFILL_TOKENS)
    assert router.outcomes[0].ids == oracle.greedy(shard.encode(ask.text), 3)


def test_line_45_stored_bytes_do_not_depend_on_company_or_chunking(any_cache: Bench) -> None:
    text = prompt_of(any_cache, 2, 7)

    def digests(run: Callable[[RouterModel], int]) -> list[str]:
        router = any_cache.router(seed=49)
        mark = any_cache.mark()
        number = run(router)
        held = any_cache.stored(mark)
        return [held[slot] for slot in router.outcomes[number].slots]

    def alone(router: RouterModel) -> int:
        router.run(Ask(text, 6))
        return 0

    def batched(router: RouterModel) -> int:
        router.run(Ask(OTHER, 3), Ask(text, 6), Ask("z", 9))
        return 1

    def chunked(router: RouterModel) -> int:
        router.run(Ask("z", 9), Ask(text, 6, chunk_len=5))
        return 1

    wanted = digests(alone)
    assert len(wanted) == len(any_cache.encode(text)) + 5
    assert digests(batched) == wanted
    assert digests(chunked) == wanted
