"""Dense linear with 8-bit float weights: decoding, blocks, one byte a weight."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles import fp8 as fp8_oracle
from oracles import kernels as oracle

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.select import KernelSet

# Either side of the 32-wide tile; blocks that divide K, leave a short last one, are odd, or span the whole row.
SHAPES = [(33, 31, 16), (5, 1, 128), (100, 577, 128), (40, 45, 15)]
ROWS = [0, 1, 6, 13]


def weight(n: int, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of every size (normal, subnormal, zero, both signs, no NaN) and scales that are no powers of two."""
    g = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 256, (n, k), generator=g, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return codes.view(torch.float8_e4m3fn), torch.rand(n, -(-k // block), generator=g) * 0.01 + 1e-3


def plain(codes: torch.Tensor, scales: torch.Tensor, block: int) -> np.ndarray:
    values = fp8_oracle.e4m3(codes.view(torch.uint8).numpy())
    return values * np.repeat(scales.numpy().astype(np.float64), block, 1)[:, : codes.shape[1]]


def test_every_code_is_decoded_as_the_format_says(kernels: KernelSet) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(1, -1)
    scale = torch.tensor([[2.0**-4]])
    packed = kernels.pack_fp8(codes.view(torch.float8_e4m3fn), scale, 254)
    expected = fp8_oracle.e4m3(codes.numpy()) * 2.0**-4
    np.testing.assert_array_equal(packed.dense().numpy(), expected)
    # A product with one input at a time reads each weight by the arithmetic of the op itself.
    np.testing.assert_array_equal(kernels.dense_linear(torch.eye(254), packed).numpy(), expected.T)


@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"M{m}")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-K{s[1]}-b{s[2]}")
def test_equals_the_written_out_sum(any_kernels: KernelSet, shape: tuple[int, int, int], rows: int) -> None:
    n, k, block = shape
    codes, scales = weight(*shape)
    x, bias, residual = torch.randn(rows, k), torch.randn(n), torch.randn(rows, n)
    y = any_kernels.dense_linear(x, any_kernels.pack_fp8(codes, scales, block), bias, residual)
    wide = plain(codes, scales, block)
    expected = oracle.linear(x.numpy(), wide, bias.numpy(), residual.numpy())
    assert y.shape == expected.shape
    if rows == 0:
        return
    size = float((abs(x.numpy()) @ abs(wide).T).max())
    # float32: rounding of the sums and, in some sets, of code * scale. bfloat16 (torch): as in test_dense_linear.
    exact = any_kernels.compute_dtype is ComputeDtype.FLOAT32 or any_kernels.name == "native"
    bound = 4 * math.sqrt(k) * 2**-24 * size + 2**-22 if exact else 3 * 2**-8 * size + 2**-20
    assert abs(y.numpy() - expected).max() <= bound


def test_a_weight_takes_one_byte_and_its_scales(kernels: KernelSet) -> None:
    codes, scales = weight(64, 256, 128)
    packed = kernels.pack_fp8(codes, scales, 128)
    assert packed.nbytes == 64 * 256 + 64 * 2 * 4
    ids = torch.tensor([63, 0, 0])
    assert torch.equal(packed.rows(ids), packed.dense()[ids])
    assert torch.equal(packed.dense(), codes.float() * scales.repeat_interleave(128, 1))


@pytest.mark.parametrize("shape", SHAPES[2:], ids=lambda s: f"N{s[0]}-K{s[1]}-b{s[2]}")
def test_a_row_has_the_same_bits_alone_and_in_a_batch(native: KernelSet, shape: tuple[int, int, int]) -> None:
    codes, scales = weight(*shape)
    packed = native.pack_fp8(codes, scales, shape[2])
    # Either side of where blocks are decoded once for all rows, and of how many rows share them.
    x = torch.randn(110, shape[1])
    whole = native.dense_linear(x, packed)
    for rows in (1, 6, 12, 13, 97):
        assert torch.equal(native.dense_linear(x[-rows:].contiguous(), packed), whole[-rows:]), rows


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    codes, scales = weight(32, 64, 32)
    with pytest.raises(ConfigError, match=r"expected \[32, 4\] float32"):
        kernels.pack_fp8(codes, scales, 16)
    with pytest.raises(ConfigError, match="expected a positive number"):
        kernels.pack_fp8(codes, scales, 0)
    with pytest.raises(ConfigError, match=r"expected \[N, K\] float8_e4m3fn"):
        kernels.pack_fp8(codes.view(torch.uint8), scales, 32)
