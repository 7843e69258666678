"""Dense linear of the GPU's set: the kernel in the emulator, the products by torch on any device."""

from __future__ import annotations

import math

import pytest
import torch
from emulation.emulated import EmulatedPrograms
from oracles import kernels as oracle

from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.dense_linear.cuda import DenseOps, Packer

OPS = DenseOps(Machine(EmulatedPrograms(), 3, 90))
PACKER = Packer(torch.device("cpu"))


@pytest.mark.parametrize("rows", [0, 1, 3, 9, 33], ids=lambda m: f"M{m}")
@pytest.mark.parametrize(("x_dtype", "k"), [(torch.float32, 256), (torch.bfloat16, 4608)], ids=str)
def test_an_exact_weight_is_multiplied_in_float32(rows: int, x_dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, k + 8).to(x_dtype), torch.randn(7, k + 4)
    bias, residual = torch.randn(7), torch.randn(rows, 7)
    y = OPS.dense_linear(x[:, :k], PACKER.pack_dense(weight[:, :k], exact=True), bias, residual)
    wide = x[:, :k].double().numpy()
    expected = oracle.linear(wide, weight[:, :k].numpy(), bias.numpy(), residual.numpy())
    # K additions, each within 2**-24 of the running sum, seldom beyond twice the root of K of them.
    size = abs(wide) @ abs(weight[:, :k].double().numpy()).T
    assert y.dtype == torch.float32
    assert (abs(y.numpy() - expected) <= 2 * math.sqrt(k) * 2**-24 * size + 2**-22).all()


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    packed, x = PACKER.pack_dense(torch.randn(5, 512), exact=True), torch.randn(7, 512)
    whole = OPS.dense_linear(x, packed)
    for rows in (1, 2, 3):
        assert torch.equal(OPS.dense_linear(x[7 - rows :], packed), whole[7 - rows :])


@pytest.mark.parametrize("rows", [1, 40], ids=lambda m: f"M{m}")
def test_sums_of_a_bfloat16_weight_are_not_rounded(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(40, 96).bfloat16()
    y = OPS.dense_linear(x, PACKER.pack_dense(weight))
    expected = oracle.linear(x.double().numpy(), weight.double().numpy())
    assert abs(y.numpy() - expected).max() <= 2**-18 * abs(expected).max()


def test_an_fp8_weight_is_widened_for_its_product() -> None:
    torch.manual_seed(0)
    codes = torch.randn(40, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(40, 2) + 0.5
    x = torch.randn(5, 200).bfloat16()
    y = OPS.dense_linear(x, PACKER.pack_fp8(codes, scales, 128))
    weight = codes.double().numpy() * scales.double().repeat_interleave(128, 1)[:, :200].numpy()
    # Widened weights are rounded to bfloat16, by 2**-8 of each at most.
    size = abs(x.double().numpy()) @ abs(weight).T
    assert (abs(y.numpy() - oracle.linear(x.double().numpy(), weight)) <= 2**-8 * size).all()


def test_output_may_be_the_residual() -> None:
    torch.manual_seed(0)
    packed, x, residual = PACKER.pack_dense(torch.randn(40, 96), exact=True), torch.randn(3, 96), torch.randn(3, 40)
    expected = OPS.dense_linear(x, packed, None, residual)
    out = residual.clone()
    assert OPS.dense_linear(x, packed, None, out, out) is out
    assert torch.equal(out, expected)
