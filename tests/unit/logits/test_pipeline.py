"""Order, independence of rows, the draw, alternatives, failures."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from oracles import sampling as oracle

from deepseek_tgi.core import SamplingParams
from deepseek_tgi.kernels.best_token.reference import best_token
from deepseek_tgi.logits.pipeline import (
    MAX_TOP_TOKENS,
    SPARE_FOR_TIES,
    Choice,
    SamplingPlan,
    SamplingState,
    identity,
    sampling_state,
)
from deepseek_tgi.logits.watermark import Watermark

VOCAB = 400
PROMPT = [3, 9, 9, 27]
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.5, seed=1),
    SamplingParams(do_sample=True, seed=2),
    SamplingParams(top_k=5, seed=3),
    SamplingParams(top_p=0.7, seed=4),
    SamplingParams(typical_p=0.6, seed=5),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(frequency_penalty=0.5, temperature=2.0, seed=6),
    SamplingParams(watermark=True),
    SamplingParams(
        temperature=0.9, top_k=50, top_p=0.9, typical_p=0.95, repetition_penalty=1.1, watermark=True, seed=7
    ),
]


def some_logits(n: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def choose(logits: torch.Tensor, states: list[SamplingState]) -> Choice:
    return SamplingPlan(states, Watermark(), identity).run(logits.clone())


def states_of(params: list[SamplingParams], top_n: int = 0) -> list[SamplingState]:
    return [sampling_state(p, PROMPT, top_n) for p in params]


def test_greedy_logprobs_are_the_models_own() -> None:
    logits = some_logits(3)
    choice = choose(logits, states_of([SamplingParams()] * 3))
    for row, token_id, logprob in zip(logits.double().tolist(), choice.ids, choice.logprobs, strict=True):
        assert token_id == max(range(VOCAB), key=row.__getitem__)
        assert logprob == pytest.approx(oracle.log_softmax(row)[token_id], abs=1e-5)


def test_logprobs_are_of_the_processed_distribution_in_the_documented_order() -> None:
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.7, temperature=0.6, top_k=20, top_p=0.8, typical_p=0.9, seed=11
    )
    logits = some_logits(1)
    scores = logits[0].double().tolist()
    scores = oracle.frequency(oracle.repetition(scores, PROMPT, 1.5), PROMPT, 0.7)
    scores = oracle.top_p(oracle.top_k(oracle.temperature(scores, 0.6), 20), 0.8)
    wanted = oracle.log_softmax(oracle.typical_p(scores, 0.9))
    choice = choose(logits, [sampling_state(params, PROMPT, VOCAB)])
    ids, logprobs = choice.tops[0]
    assert set(ids) == {i for i, v in enumerate(wanted) if v > -math.inf}
    assert logprobs == pytest.approx([wanted[i] for i in ids], abs=1e-5)
    assert choice.logprobs[0] == pytest.approx(wanted[choice.ids[0]], abs=1e-5)


def test_a_mixed_batch_gives_each_row_what_it_gets_alone() -> None:
    logits = some_logits(len(MIXED))
    together = choose(logits, states_of(MIXED, top_n=4))
    backwards = choose(logits.flip(0), states_of(MIXED[::-1], top_n=4))
    for row, params in enumerate(MIXED):
        alone = choose(logits[row : row + 1], states_of([params], top_n=4))
        other = len(MIXED) - 1 - row
        assert alone.ids[0] == together.ids[row] == backwards.ids[other]
        assert alone.logprobs[0] == together.logprobs[row] == backwards.logprobs[other]
        assert alone.tops[0] == together.tops[row] == backwards.tops[other]


def test_neutral_rows_keep_every_bit() -> None:
    logits = some_logits(len(MIXED))
    changed = logits.clone()
    SamplingPlan(states_of(MIXED), Watermark(), identity).run(changed)
    assert torch.equal(changed[0], logits[0])


def test_the_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.03, 0.01])
    n = 6000
    for params in ({"do_sample": True}, {"top_k": 6}):
        states = [sampling_state(SamplingParams(seed=s, **params), PROMPT) for s in range(n)]
        ids = torch.tensor(choose(probs.log().repeat(n, 1), states).ids)
        shares = torch.bincount(ids, minlength=6) / n
        # Five standard deviations of a share.
        assert ((shares - probs).abs() < 5 * (probs * (1 - probs) / n).sqrt()).all()


def test_draws_at_successive_positions_are_independent_of_each_other() -> None:
    state = sampling_state(SamplingParams(do_sample=True, seed=5), PROMPT)
    drawn = []
    for _ in range(2000):
        drawn.append(choose(torch.zeros(1, 2), [state]).ids[0])
        state.accept(drawn[-1])
    same = sum(a == b for a, b in itertools.pairwise(drawn)) / 1999
    assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(1999)
    assert abs(sum(drawn) / 2000 - 0.5) < 5 * 0.5 / math.sqrt(2000)


def test_the_same_seed_draws_the_same_and_another_one_not() -> None:
    logits = torch.zeros(1, VOCAB)
    for params in ({"do_sample": True}, {"top_p": 0.99}, {"temperature": 0.7}):
        drawn = [choose(logits, [sampling_state(SamplingParams(seed=s, **params), PROMPT)]).ids[0] for s in (8, 8, 9)]
        assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_every_64_bit_seed_is_fine(seed: int) -> None:
    choice = choose(some_logits(1), [sampling_state(SamplingParams(do_sample=True, seed=seed), PROMPT)])
    assert 0 <= choice.ids[0] < VOCAB
    assert not choice.failed


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.5, top_p=0.9)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = some_logits(3)
    wanted = choose(logits, states_of([params] * 3))
    if bad == float("-inf"):
        logits[1] = bad
    else:
        logits[1, 7] = bad
    choice = choose(logits, states_of([params] * 3, top_n=2))
    assert set(choice.failed) == {1}
    assert "finite" in choice.failed[1]
    for row in (0, 2):
        assert (choice.ids[row], choice.logprobs[row]) == (wanted.ids[row], wanted.logprobs[row])
        assert row in choice.tops


def test_parameters_too_extreme_for_the_scores_fail_their_row_and_say_so() -> None:
    params = [SamplingParams(), SamplingParams(repetition_penalty=1e-45)]
    logits = some_logits(2).index_fill(1, torch.tensor(PROMPT), 1.0)
    choice = choose(logits, states_of(params))
    assert set(choice.failed) == {1}
    assert "sampling parameters" in choice.failed[1]


def test_the_list_of_alternatives_is_bounded_by_what_is_sent_not_by_the_vocabulary() -> None:
    plan = SamplingPlan(states_of([SamplingParams()], top_n=2**32 - 1), Watermark(), identity)
    with torch.profiler.profile(record_shapes=True) as profile:
        ids, _ = plan.run(some_logits(1, vocab=5000)).tops[0]
    assert len(ids) == MAX_TOP_TOKENS
    topk = next(event for event in profile.events() if event.name == "aten::topk")
    assert topk.concrete_inputs[1] <= MAX_TOP_TOKENS + SPARE_FOR_TIES


def test_single_masked_scores_are_no_failure() -> None:
    logits = some_logits(1)
    logits[0, 10:] = float("-inf")
    choice = choose(logits, [sampling_state(SamplingParams(), PROMPT, 50)])
    assert not choice.failed
    assert sorted(choice.tops[0][0]) == list(range(10))


def test_alternatives_are_best_first_with_ties_at_the_last_place() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0]] * 3)
    states = [sampling_state(SamplingParams(), PROMPT, n) for n in (0, 1, 2)]
    tops = choose(logits, states).tops
    assert 0 not in tops
    assert tops[1][0] == [1]
    assert tops[2][0] == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert tops[2][1] == sorted(tops[2][1], reverse=True)


class StubConstraint:
    def __init__(self, answer: torch.Tensor | None, fault: str = "") -> None:
        self.answer = answer
        self.reason = fault
        self.accepted: list[int] = []

    def allowed(self, vocab_size: int) -> torch.Tensor | None:
        return self.answer

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def fault(self) -> str:
        return self.reason


def test_a_grammar_may_answer_with_a_list_with_none_or_with_an_empty_one() -> None:
    only = torch.zeros(VOCAB, dtype=torch.bool)
    only[42] = True
    answers = [only, None, torch.zeros(VOCAB, dtype=torch.bool)]
    logits = some_logits(4)
    states = [sampling_state(SamplingParams(), PROMPT, 3, StubConstraint(a, "too long")) for a in answers]
    choice = choose(logits, [*states, sampling_state(SamplingParams(), PROMPT)])
    assert choice.ids[0] == 42
    assert choice.logprobs[0] == 0.0
    assert choice.tops[0] == ([42], [0.0])
    assert choice.ids[1] == int(logits[1].argmax())
    assert choice.failed == {2: "the grammar allows no token here: too long"}
    assert choice.ids[3] == int(logits[3].argmax())


def test_the_cheap_path_stays_cheap() -> None:
    """Against a log-softmax and an arg-max of the same rows in the same moments: it does little more than those."""
    for rows in (1, 16):
        logits = some_logits(rows, 49152)
        plan = SamplingPlan(states_of([SamplingParams()] * rows), Watermark(), identity)
        ours = peer = math.inf
        for _ in range(60):
            start = time.perf_counter()
            plan.run(logits)
            middle = time.perf_counter()
            logits.log_softmax(-1)
            logits.argmax(-1)
            ours, peer = min(ours, middle - start), min(peer, time.perf_counter() - middle)
        assert ours < 3 * peer


def test_an_op_for_plain_rows_changes_no_choice_and_no_other_row() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.7, seed=3), SamplingParams(), SamplingParams(top_k=4)]
    for chosen in (params, params[:1] * 3):
        logits = some_logits(len(chosen))
        plain = SamplingPlan(states_of(chosen), Watermark(), identity)
        helped = SamplingPlan(states_of(chosen), Watermark(), identity)
        helped._best = best_token
        expected, got = plain.run(logits.clone()), helped.run(logits.clone())
        assert got.ids == expected.ids
        assert got.token_ids.tolist() == got.ids
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-6)
        assert [got.logprobs[i] for i in (1, 3) if len(chosen) > 3] == [
            expected.logprobs[i] for i in (1, 3) if len(chosen) > 3
        ]
    logits = some_logits(2)
    logits[1, 5] = float("nan")
    helped = SamplingPlan(states_of([SamplingParams()] * 2), Watermark(), identity)
    helped._best = best_token
    assert helped.run(logits).failed == {1: "the model's logits are not finite"}


def test_best_tokens_that_are_known_are_taken_for_those_who_wish_nothing() -> None:
    logits = some_logits(len(MIXED), seed=4)
    known = best_token(logits)
    known[0, 0] = 17.0
    expected = choose(logits, states_of(MIXED))
    got = SamplingPlan(states_of(MIXED), Watermark(), identity).begin(logits.clone(), known).result()
    assert got.ids == [17, *expected.ids[1:]]
    plain = SamplingPlan(states_of([SamplingParams()] * 2), Watermark(), identity)
    assert plain.begin(logits[:2].clone(), known[:, :2]).result().ids == [17, expected_of(logits[1])]


def test_best_tokens_of_logits_that_are_calibrated_are_not_known_before() -> None:
    logits = some_logits(2, seed=5)
    plan = SamplingPlan(states_of([SamplingParams()] * 2), Watermark(), torch.neg)
    assert plan.begin(logits.clone(), best_token(logits)).result().ids == logits.argmin(-1).tolist()


def test_a_choice_that_is_on_its_way_does_not_change_with_its_source() -> None:
    known = best_token(some_logits(2, seed=6))
    ids = known[0].tolist()
    plan = SamplingPlan(states_of([SamplingParams()] * 2), Watermark(), identity)
    choosing = plan.begin(some_logits(2, seed=6), known)
    known.fill_(5.0)
    assert choosing.result().ids == ids


def expected_of(row: torch.Tensor) -> int:
    """The place of the largest."""
    return max(range(len(row)), key=row.tolist().__getitem__)
