"""The likeliest token of each row: the GPU's kernels in the emulator here, on a device under the marker `gpu`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.best_token import BestToken, best_token_on, token_ids_on
from deepseek_tgi.kernels.best_token.cuda import CHUNK, BestTokenOp, TokenIdsOp
from deepseek_tgi.kernels.best_token.reference import best_token

WIDTHS = (1, 31, 256, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17)
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(scope="module", params=["reference", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def op(request: pytest.FixtureRequest) -> BestToken:
    if request.param == "reference":
        return best_token
    if request.param == "emulated":
        return BestTokenOp(EmulatedPrograms())
    found = best_token_on(torch.device("cuda"))
    assert found is not None

    def moved(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return found(logits.cuda()).cpu()
        return out.copy_(found(logits.cuda(), out.cuda()))

    return moved


def draw(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("width", WIDTHS)
def test_against_float64(op: BestToken, width: int) -> None:
    logits = draw(3, width)
    ids, logprobs, peaks = op(logits).numpy().astype(np.float64)
    exact = logits.numpy().astype(np.float64)
    assert ids.tolist() == exact.argmax(1).tolist()
    assert peaks.tolist() == exact.max(1).tolist()
    expected = -np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1))
    # Exponents and the logarithm are good to 2^-21, sums to the number of their stages.
    assert np.abs(logprobs - expected).max() <= 1e-5


def test_the_first_of_equals_is_taken(op: BestToken) -> None:
    logits = torch.zeros(2, 2 * CHUNK + 5)
    logits[0, [7, 300, CHUNK + 3]] = 2.0
    logits[1, [CHUNK - 1, CHUNK, 2 * CHUNK + 4]] = 2.0
    assert op(logits)[0].tolist() == [7, CHUNK - 1]


def test_cut_off_logits_count_nothing(op: BestToken) -> None:
    logits = torch.full((2, CHUNK + 40), -INFINITY)
    logits[0, CHUNK + 9] = 3.0
    logits[1, [5, CHUNK + 1]] = torch.tensor([1.0, 1.0])
    got = op(logits)
    assert got[0].tolist() == [CHUNK + 9, 5]
    assert got[1].tolist() == pytest.approx([0.0, -math.log(2)], abs=1e-6)


def test_rows_that_are_not_finite_are_told_by_their_largest(op: BestToken) -> None:
    logits = draw(5, CHUNK + 100)
    logits[0, 3] = NAN
    logits[1, CHUNK + 50] = NAN
    logits[2, 9] = INFINITY
    logits[3] = -INFINITY
    peaks = op(logits)[2]
    assert peaks[:2].isnan().all()
    assert peaks[2:4].tolist() == [INFINITY, -INFINITY]
    assert torch.equal(op(logits)[:, 4:], op(draw(5, CHUNK + 100)[4:])), "neighbours do not touch a row"


def test_huge_and_tiny_differences(op: BestToken) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e-30, 0.0, -1e-30], [-3e38, -3e38, -3e38]])
    ids, logprobs, _ = op(logits)
    assert ids.tolist() == [0, 0, 0]
    assert logprobs.tolist() == pytest.approx([0.0, -math.log(3), -math.log(3)], abs=1e-6)


def test_a_rows_bits_do_not_depend_on_the_batch(op: BestToken) -> None:
    logits = draw(9, 2 * CHUNK + 77)
    together = op(logits)
    for row in (0, 4, 8):
        assert torch.equal(op(logits[row : row + 1])[:, 0], together[:, row])


def test_rows_may_lie_apart_and_none_is_fine(op: BestToken) -> None:
    wide = draw(4, 600)
    assert torch.equal(op(wide[:, :500]), op(wide[:, :500].contiguous()))
    assert op(draw(0, 10)).shape == (3, 0)


def test_a_place_for_the_result_is_filled(op: BestToken) -> None:
    logits, out = draw(3, CHUNK + 9), torch.full((3, 3), NAN)
    assert op(logits, out) is out
    assert torch.equal(out, op(logits))
    with pytest.raises(GenerationError, match="best_token"):
        op(logits, torch.zeros(3, 4))


def test_misfits_are_refused(op: BestToken) -> None:
    for wrong in (draw(2, 8).double(), draw(2, 8)[0], draw(8, 2).t()):
        with pytest.raises(GenerationError, match="best_token"):
            op(wrong)


def test_a_cpu_keeps_torchs_operators() -> None:
    assert best_token_on(torch.device("cpu")) is None


@pytest.mark.parametrize("which", ["reference", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ids_for_the_next_step_are_in_range(which: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda" if which == "gpu" else "cpu")
    op = TokenIdsOp(EmulatedPrograms()) if which == "emulated" else token_ids_on(device)
    values = torch.tensor([0.0, 7.0, 99.0, 100.0, -3.0, NAN, INFINITY, -INFINITY] + [5.0] * 300, dtype=dtype)
    out = torch.full((308,), -1, dtype=torch.int64, device=device)
    op(values.to(device), out, 100)
    assert out[:8].tolist() == [0, 7, 99, 99, 0, 0, 99, 0]
    assert out[8:].eq(5).all()
    large = torch.tensor([(1 << 24) - 1], dtype=dtype, device=device)
    op(large, out[:1], 1 << 24)
    assert int(out[0]) == (1 << 24) - 1
