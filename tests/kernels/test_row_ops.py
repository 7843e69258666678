"""Norm, gated activation, rotation and lookup, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.select import KernelSet

ALSO = ("emulated",)
"""See `conftest`: the GPU's kernels as well."""
WIDTHS = [1, 15, 16, 17, 64, 65, 576]  # either side of a vector and of four vectors
EPS = 1e-5


@pytest.mark.parametrize("rows", [0, 1, 3, 40], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("width", WIDTHS, ids=lambda w: f"H{w}")
def test_norm_equals_its_definition(kernels: KernelSet, width: int, rows: int) -> None:
    x, weight = torch.randn(rows, width) * 3, torch.rand(width) + 0.5
    expected = oracle.rms_norm(x.numpy(), weight.numpy(), EPS)
    # The sum of squares is off by less than 1e-6 of itself, its root by half that; three more roundings.
    assert np.allclose(kernels.rms_norm(x, weight, EPS).numpy(), expected, rtol=1e-6, atol=1e-30)


def test_norm_works_on_heads_of_a_wider_buffer_in_place(kernels: KernelSet) -> None:
    buffer = torch.randn(5, 200)
    before = buffer.clone()
    heads, weight = buffer[:, 40:136].view(5, 4, 24), torch.rand(24)
    expected = oracle.rms_norm(heads.numpy(), weight.numpy(), EPS)
    assert kernels.rms_norm(heads, weight, EPS, heads) is heads
    assert np.allclose(heads.numpy(), expected, rtol=1e-6)
    assert torch.equal(buffer[:, :40], before[:, :40])
    assert torch.equal(buffer[:, 136:], before[:, 136:])


@pytest.mark.parametrize("rows", [0, 1, 3, 40], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("width", WIDTHS, ids=lambda w: f"I{w}")
def test_gated_activation_equals_its_definition(kernels: KernelSet, width: int, rows: int) -> None:
    gate_up = torch.randn(rows, 2 * width) * 10
    expected = oracle.silu_mul(gate_up.numpy())
    # exp is within 2 ulp, then a sum, a quotient and a product: below 8 * 2**-24.
    assert np.allclose(kernels.silu_mul(gate_up).numpy(), expected, rtol=8 * 2**-24, atol=1e-30)


@pytest.mark.parametrize("gate", [-1e4, -104.0, -88.0, 0.0, 88.0, 1e4])
def test_gated_activation_is_finite_far_out(kernels: KernelSet, gate: float) -> None:
    y = kernels.silu_mul(torch.tensor([[gate, 2.0]]))
    assert abs(float(y) - max(gate, 0.0) * 2) <= 1e-30 + abs(min(gate, 0.0)) * 1e-35


@pytest.mark.parametrize("rotary", [64, 24, 2], ids=lambda r: f"R{r}")
@pytest.mark.parametrize("rows", [0, 1, 7], ids=lambda t: f"T{t}")
def test_rotation_turns_pairs_by_their_angle(kernels: KernelSet, rows: int, rotary: int) -> None:
    half = rotary // 2
    angles = np.random.default_rng(0).uniform(-3, 3, (50, half))
    cos_sin = torch.from_numpy(np.concatenate((np.cos(angles), np.sin(angles)), 1)).float()
    positions = torch.randint(0, 50, (rows,), dtype=torch.int32)
    qkv = torch.randn(rows, 5 * 64 + 7)  # q, k and v of 3, 1 and 1 heads in rows of odd length
    q, k = qkv[:, :192].view(rows, 3, 64), qkv[:, 192:256].view(rows, 1, 64)
    before, expected = qkv.clone(), [oracle.rotate(x.numpy(), angles[positions.numpy()]) for x in (q, k)]
    kernels.rope(q, k, positions, cos_sin)
    for x, want in zip((q, k), expected, strict=True):
        assert np.allclose(x.numpy(), want, atol=2e-6)  # two products of numbers below 5, float32 cosines
    assert torch.equal(qkv[:, 256:], before[:, 256:])


def test_a_row_has_the_same_bits_alone_and_in_a_batch(native: KernelSet) -> None:
    x, weight = torch.randn(40, 577), torch.rand(577)
    gate_up = torch.randn(40, 600)
    normed, gated = native.rms_norm(x, weight, EPS), native.silu_mul(gate_up)
    for i in (0, 17, 39):
        assert torch.equal(native.rms_norm(x[i : i + 1], weight, EPS)[0], normed[i])
        assert torch.equal(native.silu_mul(gate_up[i : i + 1])[0], gated[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lookup_gives_the_stored_rows(kernels: KernelSet, dtype: torch.dtype) -> None:
    table = torch.randn(33, 17).to(dtype)
    ids = torch.tensor([32, 0, 5, 5])
    assert torch.equal(kernels.embedding(ids, table), table[ids].float())
    assert torch.equal(kernels.embedding(ids, kernels.pack_dense(table)), table[ids].float())
    assert kernels.embedding(ids[:0], table).shape == (0, 17)


@pytest.mark.parametrize("bad", [-1, 33])
def test_lookup_refuses_ids_outside_the_table(kernels: KernelSet, bad: int) -> None:
    with pytest.raises(GenerationError, match="expected 0 to 32"):
        kernels.embedding(torch.tensor([0, bad]), torch.randn(33, 4))


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    with pytest.raises(GenerationError, match="weight"):
        kernels.rms_norm(torch.randn(2, 8), torch.rand(7), EPS)
    with pytest.raises(GenerationError, match="gate_up"):
        kernels.silu_mul(torch.randn(2, 7))
    with pytest.raises(GenerationError, match="positions"):
        kernels.rope(torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.tensor([0, 1]), torch.randn(4, 8))
    with pytest.raises(GenerationError, match="cos_sin"):
        kernels.rope(torch.randn(1, 1, 8), torch.randn(1, 1, 8), torch.zeros(1, dtype=torch.int32), torch.randn(4, 10))
