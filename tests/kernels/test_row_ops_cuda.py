"""Row operations as a GPU runs them on bfloat16 activations, emulated: against float64, rounded once."""

from __future__ import annotations

import pytest
import torch
from emulation.emulated import EmulatedPrograms

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
    assert torch.allclose(op(rows, weight, 1e-5), op(rows.clone(), weight, 1e-5), rtol=1e-6)


@pytest.mark.parametrize("width", [1, 8, 13, 1032])
def test_gated_activation_rounds_once(width: int) -> None:
    gate_up = torch.randn(2, 2 * width).bfloat16()
    got = CudaSiluMul(EmulatedPrograms())(gate_up)
    gate, up = gate_up.double().chunk(2, 1)
    assert close(got, gate / (1 + (-gate).exp()) * up)
