"""Choosing tokens where the logits are, on a GPU: what the CPU chooses of the same logits."""

from __future__ import annotations

import pytest
import torch

from deepseek_tgi.core import SamplingParams
from deepseek_tgi.logits.pipeline import SamplingPlan, SamplingState, identity, sampling_state
from deepseek_tgi.logits.watermark import Watermark

pytestmark = pytest.mark.gpu

VOCAB = 128256
PROMPT = [3, 9, 9, 27, 70000]
KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.5, seed=1),
    "drawn": SamplingParams(do_sample=True, seed=2),
    "top-k": SamplingParams(top_k=5, seed=3),
    "top-p": SamplingParams(top_p=0.7, seed=4),
    "top-p, flat": SamplingParams(top_p=0.9, temperature=20.0, seed=8),
    "typical": SamplingParams(typical_p=0.6, seed=5),
    "repetition": SamplingParams(repetition_penalty=1.4),
    "frequency": SamplingParams(frequency_penalty=0.5, temperature=2.0, seed=6),
    "watermark": SamplingParams(watermark=True),
    "all": SamplingParams(
        temperature=0.9, top_k=50, top_p=0.9, typical_p=0.95, repetition_penalty=1.1, watermark=True, seed=7
    ),
}


class Even:
    """A grammar that allows even ids."""

    def allowed(self, vocab_size: int) -> torch.Tensor | None:
        return torch.arange(vocab_size) % 2 == 0

    def accept(self, token_id: int) -> None: ...

    def fault(self) -> str:
        return ""


def states(kinds: list[str]) -> list[SamplingState]:
    made = [sampling_state(KINDS[kind], PROMPT, top_n_tokens=3 if kind == "greedy" else 0) for kind in kinds]
    for state in made:
        if state.params.top_k == 5:
            state.constraint = Even()
    return made


def draw(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(11)) * 3


@pytest.mark.parametrize("kinds", [list(KINDS), *([kind] for kind in KINDS), ["watermark", "drawn"]], ids=str)
def test_the_cpus_choice(kinds: list[str]) -> None:
    logits = draw(len(kinds))
    ours, theirs = (SamplingPlan(states(kinds), Watermark(), identity) for _ in range(2))
    for _ in range(3):
        got, want = ours.run(logits.cuda()), theirs.run(logits.clone())
        assert got.ids == want.ids
        assert got.token_ids.device.type == "cpu"
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert {row: ids for row, (ids, _) in got.tops.items()} == {row: ids for row, (ids, _) in want.tops.items()}
        assert got.failed == want.failed
        logits = logits.roll(1, 1)


def test_rows_that_fail_are_named_and_touch_no_other() -> None:
    logits = draw(3)
    logits[1, 5] = float("nan")
    plan = SamplingPlan(states(["drawn", "temperature", "drawn"]), Watermark(), identity)
    got = plan.run(logits.cuda())
    assert list(got.failed) == [1]
    clean = draw(3)
    alone = SamplingPlan(states(["drawn", "temperature", "drawn"]), Watermark(), identity).run(clean.cuda())
    assert (got.ids[0], got.ids[2]) == (alone.ids[0], alone.ids[2])


def test_a_rows_bits_do_not_depend_on_what_its_neighbours_wish() -> None:
    logits = draw(2)
    alone = SamplingPlan([sampling_state(SamplingParams(), PROMPT)], Watermark(), identity).run(logits[:1].cuda())
    mixed = [sampling_state(SamplingParams(), PROMPT), sampling_state(KINDS["all"], PROMPT)]
    together = SamplingPlan(mixed, Watermark(), identity).run(logits.cuda())
    assert (alone.ids[0], alone.logprobs[0]) == (together.ids[0], together.logprobs[0])
