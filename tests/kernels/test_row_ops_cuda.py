"""Row operations as a GPU runs them on bfloat16 activations, emulated: against float64, rounded once."""

from __future__ import annotations

import pytest
import torch
from emulation.emulated import EmulatedPrograms

from deepseek_tgi.kernels.common import PlainDense
from deepseek_tgi.kernels.embedding.cpu import embedding
from deepseek_tgi.kernels.embedding.cuda import CudaEmbedding
from deepseek_tgi.kernels.rms_norm.cuda import CudaRmsNorm
from deepseek_tgi.kernels.silu_mul.cuda import CudaSiluMul

HALF_ULP = 2.0**-8


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within bfloat16's rounding and float32's on top."""
    return bool(((got.double() - wanted).abs() <= wanted.abs() * HALF_ULP * 1.01 + 1e-30).all())


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 12, 520, 4104])  # one run; no run; beside a power of two; several runs a thread
def test_norm_rounds_once(width: int, given: torch.dtype) -> None:
    x, weight = torch.randn(3, width).to(given), torch.rand(width) + 0.5
    out = torch.full((3, width), float("nan"), dtype=torch.bfloat16)
    CudaRmsNorm(EmulatedPrograms(), torch.bfloat16)(x, weight, 1e-5, out)
    wide = x.double()
    wanted = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert close(out, wanted)


def test_norm_of_rows_that_lie_off_a_boundary_is_the_same() -> None:
    memory = torch.randn(3 * 24 + 1)
    rows = memory[1:].view(3, 24)
    op = CudaRmsNorm(EmulatedPrograms(), torch.float32)
    weight = torch.ones(24)
    wanted = rows.double() / (rows.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    for given in (rows, rows.clone(), rows, rows.clone()):  # as the op finds them, whatever came before
        assert torch.allclose(op(given, weight, 1e-5).double(), wanted, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 8, 13, 1032])
def test_gated_activation_rounds_once(width: int) -> None:
    gate_up = torch.randn(2, 2 * width).bfloat16()
    got = CudaSiluMul(EmulatedPrograms())(gate_up)
    gate, up = gate_up.double().chunk(2, 1)
    assert close(got, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [8, 1032, 2048])
def test_rows_are_looked_up_exactly(width: int, given: torch.dtype) -> None:
    table, ids = torch.randn(9, width).to(given), torch.tensor([3, 8, 0, 3])
    op = CudaEmbedding(EmulatedPrograms(), refusing)
    assert torch.equal(op(ids, table), table[ids].float())
    assert torch.equal(op(ids[::2], PlainDense(table)), table[ids[::2]].float())


def test_tables_that_vectors_do_not_fit_are_left_to_others() -> None:
    op, ids = CudaEmbedding(EmulatedPrograms(), embedding), torch.tensor([1, 0])
    for table in (torch.randn(3, 12), torch.randn(3, 32)[:, :16], torch.randn(49)[1:].view(3, 16)):
        assert torch.equal(op(ids, table), table[ids])
    assert op(ids[:0], torch.randn(3, 16)).shape == (0, 16)


def refusing(ids: torch.Tensor, table: object) -> torch.Tensor:
    """Stands in for what is not to be asked."""
    raise AssertionError
