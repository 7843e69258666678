"""Each cut against the formula written as float64 loops, and against transformers where it means the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles import sampling as oracle
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from deepseek_tgi.logits.warp import BANDS, FIRST_LOOK, apply_temperature, apply_top_k, apply_top_p, apply_typical_p

NEG = float("-inf")


def rows(n: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set((row > NEG).nonzero().flatten().tolist()) for row in logits]


def assert_nearly_same_cut(ours: torch.Tensor, wanted: torch.Tensor, probs: torch.Tensor) -> None:
    """Equal but for tokens so light that rounding of the cumulated mass may decide."""
    for row in range(len(ours)):
        for token_id in kept(ours)[row] ^ kept(wanted)[row]:
            assert probs[row, token_id] < 2e-6
        both = (ours[row] > NEG) & (wanted[row] > NEG)
        assert torch.equal(ours[row][both], wanted[row][both])


CUTS: list[tuple[str, Callable[..., torch.Tensor], Callable[..., list[float]], list[float]]] = [
    ("top_k", apply_top_k, oracle.top_k, [1, 2, 5, 500]),
    ("top_p", apply_top_p, oracle.top_p, [1e-4, 0.3, 0.9, 0.999]),
    ("typical_p", apply_typical_p, oracle.typical_p, [0.05, 0.3, 0.9, 0.999]),
]


@pytest.mark.parametrize(("ours", "formula", "values"), [c[1:] for c in CUTS], ids=[c[0] for c in CUTS])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_cut_equals_the_formula(
    ours: Callable[..., torch.Tensor], formula: Callable[..., list[float]], values: list[float], scale: float
) -> None:
    logits = rows(len(values), 97, scale)
    wanted = torch.tensor([formula(row, v) for row, v in zip(logits.double().tolist(), values, strict=True)])
    values_tensor = torch.tensor(values, dtype=torch.int64 if ours is apply_top_k else torch.float32)
    assert_nearly_same_cut(ours(logits, values_tensor), wanted.float(), logits.softmax(-1))


@pytest.mark.parametrize("vocab", [FIRST_LOOK - 1, FIRST_LOOK, FIRST_LOOK + 1, 5000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_wide_cuts_equal_transformers(vocab: int, scale: float) -> None:
    logits = rows(3, vocab, scale)
    probs = logits.softmax(-1)
    for value in (0.2, 0.7, 0.95):
        given = torch.full((3,), value)
        ids = torch.zeros(3, 1, dtype=torch.long)
        assert_nearly_same_cut(apply_top_p(logits, given), TopPLogitsWarper(value)(ids, logits), probs)
        assert_nearly_same_cut(apply_typical_p(logits, given), TypicalLogitsWarper(value)(ids, logits), probs)


def test_top_k_and_temperature_equal_transformers() -> None:
    logits = rows(4, 1000, 3.0)
    ids = torch.zeros(4, 1, dtype=torch.long)
    assert torch.equal(apply_top_k(logits, torch.tensor([7] * 4)), TopKLogitsWarper(7)(ids, logits))
    ours = apply_temperature(logits, torch.full((4,), 0.6))
    theirs = TemperatureLogitsWarper(0.6)(ids, logits)
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_ties_at_the_kth_place_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert kept(apply_top_k(logits, torch.tensor([2]))) == [{1, 2, 3}]


def test_nucleus_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 4).log()
    got = kept(apply_top_p(logits, torch.tensor([0.4, 0.5, 0.51, 0.75])))
    assert got == [{0}, {0}, {0, 1}, {0, 1}]


def test_a_flat_row_keeps_the_exact_share() -> None:
    logits = torch.zeros(2, 4096)
    assert [len(k) for k in kept(apply_top_p(logits, torch.tensor([0.25, 0.5])))] == [1024, 2048]
    # All are equally typical, and ties stay.
    assert [len(k) for k in kept(apply_typical_p(logits, torch.tensor([0.25, 0.5])))] == [4096, 4096]


def test_masked_tokens_stay_masked_through_every_cut() -> None:
    logits = rows(2, 300, 1.0)
    logits[:, 50:] = NEG
    cut = apply_temperature(logits, torch.full((2,), 0.5))
    for step, value in ((apply_top_k, 40), (apply_top_p, 0.9), (apply_typical_p, 0.9)):
        cut = step(cut, torch.tensor([value] * 2))
    assert all(k and k <= set(range(50)) for k in kept(cut))


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-38])
def test_tiny_temperatures_leave_the_best_token(temperature: float) -> None:
    logits = (rows(2, 500, 1.0) * 1e4).half().float()
    probs = apply_temperature(logits, torch.full((2,), temperature)).softmax(-1)
    assert not probs.isnan().any()
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    assert kept(apply_top_p(logits, torch.full((2,), 1e-4))) == [{int(i)} for i in logits.argmax(-1)]


def test_rows_do_not_know_their_neighbours() -> None:
    logits = torch.cat([rows(3, 3000, s) for s in (0.05, 1.0, 6.0)])
    values = torch.tensor([0.5, 0.9, 0.99] * 3)
    for step in (apply_top_p, apply_typical_p, apply_temperature):
        together = step(logits, values)
        for row in range(len(logits)):
            assert torch.equal(step(logits[row : row + 1], values[row : row + 1])[0], together[row])


def test_more_surprise_than_the_bands_reach_still_sorts() -> None:
    # Everything but two tokens lies beyond the last band's edge.
    logits = torch.full((1, 4 * FIRST_LOOK), -3.0 * BANDS)
    logits[0, :2] = 0.0
    assert kept(apply_top_p(logits, torch.tensor([0.999]))) == [{0, 1}]
