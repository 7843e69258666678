"""Penalties by hand and against transformers; watermark against its definition."""

from __future__ import annotations

import pytest
import torch
from oracles import sampling as oracle
from transformers import RepetitionPenaltyLogitsProcessor

from deepseek_tgi.logits.penalties import INITIAL_CAPACITY, SeenTokens, apply_penalties
from deepseek_tgi.logits.watermark import Watermark


def penalised(logits: torch.Tensor, seen: list[list[int]], r: list[float], f: list[float]) -> torch.Tensor:
    out = logits.clone()
    states = [SeenTokens(ids) for ids in seen]
    apply_penalties(out, torch.arange(len(seen)), states, torch.tensor(r), torch.tensor(f))
    return out


def test_repetition_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    got = penalised(logits, [[0, 1, 1, 1, 1, 1]], [1.5], [0.0])
    torch.testing.assert_close(got, torch.tensor([[2.0 / 1.5, -1.5, 0.5]]), rtol=0, atol=1e-7)


def test_frequency_is_relative_to_the_sequence() -> None:
    got = penalised(torch.zeros(1, 4), [[1, 1, 1, 3]], [1.0], [2.0])
    torch.testing.assert_close(got, torch.tensor([[0.0, -1.5, 0.0, -0.5]]))


def test_mixed_rows_equal_the_formulae() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 50, generator=generator)
    seen = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in (1, 7, 200)]
    r, f = [1.3, 1.0, 0.7], [0.0, 0.8, -0.4]
    wanted = [
        oracle.frequency(oracle.repetition(row, ids, a), ids, b)
        for row, ids, a, b in zip(logits.double().tolist(), seen, r, f, strict=True)
    ]
    torch.testing.assert_close(penalised(logits, seen, r, f), torch.tensor(wanted).float(), rtol=1e-6, atol=1e-6)


def test_repetition_equals_transformers() -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    ids = [5, 9, 9, 63, 0]
    theirs = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([ids]), logits.clone())
    torch.testing.assert_close(penalised(logits, [ids], [1.2], [0.0]), theirs, rtol=1e-6, atol=0)


def test_unseen_scores_and_other_rows_keep_every_bit() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    out = logits.clone()
    apply_penalties(out, torch.tensor([1]), [SeenTokens([4, 4])], torch.tensor([1.7]), torch.tensor([0.3]))
    changed = (out != logits).nonzero().tolist()
    assert changed == [[1, 4]]


def test_tokens_can_be_added_one_by_one() -> None:
    ids = [i % 150 for i in range(3 * INITIAL_CAPACITY)]
    grown, whole = SeenTokens(ids[:2]), SeenTokens(ids)
    for token_id in ids[2:]:
        grown.add(token_id)
    assert grown.length == whole.length == len(ids)
    assert dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True)) == dict(
        zip(whole.ids.tolist(), whole.counts.tolist(), strict=True)
    )
    assert sum(whole.counts.tolist()) == len(ids)


@pytest.mark.parametrize("gamma", [0.25, 0.5])
def test_watermark_favours_the_list_that_follows_from_the_token_before(gamma: float) -> None:
    row = torch.zeros(100)
    Watermark(gamma, 3.0).apply(row, 17)
    generator = torch.Generator().manual_seed(15485863 * 17)
    favoured = torch.randperm(100, generator=generator)[: int(100 * gamma)]
    assert set(row.nonzero().flatten().tolist()) == set(favoured.tolist())
    assert set(row.unique().tolist()) == {0.0, 3.0}
