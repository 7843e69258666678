"""Logprobs, processors, seeds and alternatives: lines 50 to 53 of the contract's checklist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles.greedy import GreedyOracle
from oracles.sampling import log_softmax
from oracles.tgi_processors import processed_logprobs
from router_model import Ask, Outcome
from scripted_texts import MODEL_VOCAB_SIZE, flat_logits
from shard_bench import Bench

FIXED = "fixed logits aab"
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_p": 0.95}

CASES: dict[str, dict[str, Any]] = {
    "neutral": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top-k cuts at a tie": {"top_k": 3},
    "top-k of everything": {"top_k": 100000},
    "top-p": {"top_p": 0.7},
    "top-p keeps one": {"top_p": 0.01},
    "typical-p": {"typical_p": 0.6},
    "typical-p keeps few": {"typical_p": 0.05},
    "repetition": {"repetition_penalty": 1.5},
    "repetition rewards": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 1.2},
    "frequency rewards": {"frequency_penalty": -0.8},
    "watermark": {"watermark": True},
    "all at once": {
        "temperature": 0.8,
        "top_k": 60,
        "top_p": 0.9,
        "typical_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "watermark": True,
    },
}


def test_line_50_greedy_logprobs_match_the_reference(shard: Bench, oracle: GreedyOracle) -> None:
    texts = ["the first of three", "x", "and a third one, rather longer than the others were"]
    outcomes = shard.router().run(*[Ask(t, 12) for t in texts])
    for text, outcome in zip(texts, outcomes, strict=True):
        ids = shard.encode(text)
        assert outcome.ids == oracle.greedy(ids, 12)
        np.testing.assert_allclose(outcome.logprobs, oracle.greedy_logprobs(ids, 12), atol=1e-3)


def distribution(outcome: Outcome, step: int = 0) -> np.ndarray:
    """The whole processed distribution, asked for as alternatives; ids that were masked are -inf."""
    row = np.full(MODEL_VOCAB_SIZE, -np.inf)
    listed = outcome.top[step]
    row[list(listed.ids)] = listed.logprobs
    return row


def compare(outcome: Outcome, history: list[int], case: dict[str, Any]) -> None:
    """The processed distribution is the reference's, and the token's own logprob is part of it."""
    wanted = processed_logprobs(flat_logits(), history, **case)
    got = distribution(outcome)
    assert np.array_equal(np.isinf(got), np.isinf(wanted)), "other ids were masked"
    kept = ~np.isinf(wanted)
    np.testing.assert_allclose(got[kept], wanted[kept], atol=2e-4)
    assert outcome.logprobs[0] == pytest.approx(got[outcome.ids[0]], abs=1e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_line_51_each_processor_matches_its_formula(scripted: Bench, case: dict[str, Any]) -> None:
    (outcome,) = scripted.router().run(Ask(FIXED, 1, top_n=MODEL_VOCAB_SIZE, parameters={**case, "seed": 3}))
    compare(outcome, scripted.encode(FIXED), case)


def test_line_51_processors_do_not_meet_in_a_mixed_batch(scripted: Bench) -> None:
    asks = [Ask(FIXED, 1, top_n=MODEL_VOCAB_SIZE, parameters={**case, "seed": 4}) for case in CASES.values()]
    for outcome, case in zip(scripted.router().run(*asks), CASES.values(), strict=True):
        compare(outcome, scripted.encode(FIXED), case)


def test_line_51_penalties_count_the_output_too(scripted: Bench) -> None:
    case = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    (outcome,) = scripted.router().run(Ask(FIXED, 5, top_n=MODEL_VOCAB_SIZE, parameters=case))
    history = scripted.encode(FIXED)
    for step in range(5):
        wanted = processed_logprobs(flat_logits(), history, **case)
        np.testing.assert_allclose(distribution(outcome, step), wanted, atol=2e-4)
        assert outcome.ids[step] == int(wanted.argmax())
        history.append(outcome.ids[step])


def test_line_51_draws_follow_the_distribution(scripted: Bench) -> None:
    case = {"do_sample": True, "temperature": 1.0, "top_k": 5}
    wanted = np.exp(processed_logprobs(flat_logits(), scripted.encode(FIXED), top_k=5))
    draws = 900
    counts = np.zeros(MODEL_VOCAB_SIZE)
    for start in range(0, draws, 100):
        asks = [Ask(FIXED, 1, parameters={**case, "seed": 1000 + start + i}) for i in range(100)]
        for outcome in scripted.router().run(*asks):
            counts[outcome.ids[0]] += 1
    kept = wanted > 0
    assert counts[~kept].sum() == 0
    chi_square = (((counts - draws * wanted) ** 2)[kept] / (draws * wanted[kept])).sum()
    assert chi_square < 23.5, "4 degrees of freedom: one false alarm in ten thousand"


def test_line_52_equal_seeds_give_equal_text_whatever_else_runs(scripted: Bench) -> None:
    ask = Ask("a seeded story", 12, parameters={**SAMPLED, "seed": 42})
    alone = scripted.router().run(ask)[0]
    random_neighbour = Ask("noise", 20, parameters={**SAMPLED, "seed": 7})
    router = scripted.router(seed=1)
    router.admit(random_neighbour)
    router.step()
    router.admit(ask, Ask("greedy", 4))
    router.step()
    router.cancel(0)
    router.step()
    router.admit(random_neighbour)
    router.finish()
    assert router.outcomes[1].ids == alone.ids
    assert router.outcomes[1].logprobs == alone.logprobs
    swapped = scripted.router(seed=2)
    assert swapped.run(random_neighbour, ask)[1].ids == alone.ids


def test_line_52_other_seeds_give_other_text(scripted: Bench) -> None:
    asks = [Ask("a seeded story", 12, parameters={**SAMPLED, "seed": s}) for s in (0, 1, 2**63, 2**64 - 1)]
    outcomes = scripted.router().run(*asks)
    assert len({tuple(o.ids) for o in outcomes}) == 4


@pytest.mark.parametrize(
    ("parameters", "sampled"),
    [
        ({}, False),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.2, "watermark": True}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 4}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
    ],
    ids=str,
)
def test_line_52_the_seed_comes_back_only_if_tokens_were_drawn(
    scripted: Bench, parameters: dict[str, Any], sampled: bool
) -> None:
    (outcome,) = scripted.router().run(Ask("seed or not", 2, parameters={**parameters, "seed": 2**64 - 5}))
    assert outcome.final is not None
    assert outcome.final.HasField("seed") == sampled
    assert not sampled or outcome.final.seed == 2**64 - 5


def test_line_53_alternatives_are_one_list_a_token_best_first(scripted: Bench) -> None:
    none, one, three = scripted.router().run(*[Ask("alternatives", 4, top_n=n) for n in (0, 1, 3)])
    assert not none.top
    assert [len(t.ids) for t in one.top] == [1] * 4
    assert [len(t.ids) for t in three.top] == [3] * 4
    for outcome in (one, three):
        for token, logprob, listed in zip(outcome.ids, outcome.logprobs, outcome.top, strict=True):
            assert list(listed.logprobs) == sorted(listed.logprobs, reverse=True)
            assert listed.ids[0] == token
            assert listed.logprobs[0] == logprob
            assert len(listed.texts) == len(listed.is_special) == len(listed.ids)


def test_line_53_ties_at_the_last_place_are_all_there_and_masked_ids_never(scripted: Bench) -> None:
    three, masked = scripted.router().run(
        Ask(FIXED, 1, top_n=3), Ask(FIXED, 1, top_n=50, parameters={"top_k": 2, "seed": 1})
    )
    assert set(three.top[0].ids) == {65, 66, 67, 68}
    wanted = log_softmax(flat_logits())
    np.testing.assert_allclose(three.top[0].logprobs, sorted(wanted[65:69], reverse=True), atol=1e-4)
    assert list(masked.top[0].ids) == [65, 66]
