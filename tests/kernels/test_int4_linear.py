"""INT4 linear: every implementation against the written-out sum, and the promise about batches."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.errors import ConfigError, GenerationError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.select import KernelSet

# N either side of the 32-wide tile, K and groups that divide evenly, oddly, and into several padded blocks.
SHAPES = [
    (32, 64, 64),
    (33, 192, 64),
    (48, 96, 32),
    (31, 128, 128),
    (70, 300, 300),
    (5, 24, 24),
    (64, 1152, 576),
    (1, 2, 1),
]
# Either side of the switches: 4 rows direct, 12 (float32: 6) a register tile, 96 a chunk.
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 96, 97]

Int4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


def int4(n: int, k: int, group_size: int, dtype: torch.dtype = torch.float16) -> Int4:
    """A random weight whose scales keep products near 1."""
    g = torch.Generator().manual_seed(n * 7919 + k)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, k // group_size), generator=g, dtype=torch.uint8)
    scales = (torch.rand(n, k // group_size, generator=g) * 0.1 + 0.01).to(dtype)
    return codes, zeros, scales, group_size


def written_out(w: Int4) -> oracle.Array:
    """The oracle's weight."""
    codes, zeros, scales = (t.float().numpy() for t in w[:3])
    return oracle.int4_weight(codes, zeros, scales, w[3])


def tolerance(kernels: KernelSet, x: torch.Tensor, w: Int4) -> float:
    """Bound on one output's error, from how each form rounds.

    float32: K additions of products, each within eps of the running sum: K * 2**-24 * sum|x||w| is never reached, its
    square root times 4 is never passed. bfloat16: at most what rounding each activation, by 2**-8 of itself, may cost;
    torch's operator rounds scales, zero offsets (up to 8 scales large) and results as well: 4 such roundings.
    """
    weight = written_out(w)
    size = float((abs(x.numpy()) @ abs(weight).T).max()) if x.numel() else 0.0
    if kernels.compute_dtype is ComputeDtype.FLOAT32:
        return 4 * math.sqrt(w[0].shape[1]) * 2**-24 * size + 1e-30
    return (2**-8 if kernels.name == "native" else 4 * 2**-8) * size


@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"M{m}")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-K{s[1]}-g{s[2]}")
def test_equals_the_written_out_sum(any_kernels: KernelSet, shape: tuple[int, int, int], rows: int) -> None:
    w = int4(*shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
    bias, residual = torch.randn(shape[0]), torch.randn(rows, shape[0])
    expected = oracle.linear(x.numpy(), written_out(w), bias.numpy(), residual.numpy())
    y = any_kernels.int4_linear(x, any_kernels.pack_int4(*w), bias, residual)
    assert y.shape == expected.shape
    if rows:
        # Adding bias and residual rounds twice more, at the size of what is added.
        assert abs(y.numpy() - expected).max() <= tolerance(any_kernels, x, w) + 2**-22 * (abs(expected).max() + 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-K{s[1]}-g{s[2]}")
def test_packing_loses_nothing(kernels: KernelSet, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    w = int4(*shape, dtype)
    expected = written_out(w)
    packed = kernels.pack_int4(*w)
    # One float32 rounding of an exact difference times a scale.
    assert abs(packed.dequantise().numpy() - expected).max() <= 2**-24 * abs(expected).max()


@pytest.mark.parametrize("shape", [(33, 192, 64), (70, 300, 300)], ids=lambda s: f"N{s[0]}-K{s[1]}-g{s[2]}")
def test_a_row_has_the_same_bits_alone_and_in_a_batch(native: KernelSet, shape: tuple[int, int, int]) -> None:
    packed = native.pack_int4(*int4(*shape))
    x = torch.randn(200, shape[1])
    whole = native.int4_linear(x, packed)
    for rows in ROWS[1:]:
        start = 200 - rows
        assert torch.equal(native.int4_linear(x[start:].contiguous(), packed), whole[start:]), rows


@pytest.mark.parametrize("rows", [1, 5, 40], ids=lambda m: f"M{m}")
def test_fused_forms_equal_their_parts(any_kernels: KernelSet, rows: int) -> None:
    packed = any_kernels.pack_int4(*int4(48, 96, 32))
    x, weight, bias = torch.randn(rows, 96), torch.rand(96), torch.randn(48)
    gate_up, residual = torch.randn(rows, 192), torch.randn(rows, 48)
    normed = any_kernels.int4_linear(any_kernels.rms_norm(x, weight, 1e-5), packed, bias)
    assert torch.equal(any_kernels.norm_int4_linear(x, weight, 1e-5, packed, bias=bias), normed)
    gated = any_kernels.int4_linear(any_kernels.silu_mul(gate_up), packed, bias, residual)
    assert torch.equal(any_kernels.silu_int4_linear(gate_up, packed, bias, residual), gated)


def test_rows_may_lie_apart(any_kernels: KernelSet) -> None:
    packed = any_kernels.pack_int4(*int4(48, 96, 32))
    wide, weight = torch.randn(5, 160), torch.rand(96)
    apart, dense = wide[:, 32:128], wide[:, 32:128].contiguous()
    assert torch.equal(any_kernels.int4_linear(apart, packed), any_kernels.int4_linear(dense, packed))
    normed = any_kernels.norm_int4_linear(dense, weight, 1e-6, packed)
    assert torch.equal(any_kernels.norm_int4_linear(apart, weight, 1e-6, packed), normed)


def test_output_may_be_the_residual(kernels: KernelSet) -> None:
    packed = kernels.pack_int4(*int4(48, 96, 32))
    x, residual = torch.randn(3, 96), torch.randn(3, 48)
    expected = kernels.int4_linear(x, packed, None, residual)
    out = residual.clone()
    assert kernels.int4_linear(x, packed, None, out, out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_row(native: KernelSet, bad: float) -> None:
    packed = native.pack_int4(*int4(48, 96, 32))
    x = torch.randn(6, 96)
    clean = native.int4_linear(x, packed)
    x[2, 70] = bad
    y = native.int4_linear(x, packed)
    assert y[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(y[kept], clean[kept])


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e35])
def test_magnitude_does_not_matter(native: KernelSet, size: float) -> None:
    w = int4(33, 192, 64)
    x = torch.randn(5, 192)
    y = native.int4_linear(x * size, native.pack_int4(*w)).double() / size
    expected = native.int4_linear(x, native.pack_int4(*w))
    # Scaling by a number that is no power of two rounds each activation once more; below 2**-95 digits get coarser, to
    # 2**-110, a thousandth of the smallest size here.
    assert (y - expected).abs().max() <= (1e-2 if size < 2**-95 else 1e-4) * expected.abs().max()


def test_int4_stays_int4_in_memory(kernels: KernelSet) -> None:
    if kernels.name == "reference":
        pytest.skip("the reference keeps the checkpoint's own tensors")
    packed = kernels.pack_int4(*int4(256, 1024, 64))
    # Half a byte a weight, and for each group of 64 a scale of 2 bytes and a zero of 1.
    assert packed.nbytes <= 256 * 1024 * (0.5 + 3 / 64)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda w: (w[0].int(), *w[1:]), "codes"),
        (lambda w: (w[0], w[1][:, :1], *w[2:]), "zeros"),
        (lambda w: (*w[:2], w[2].int(), w[3]), "scales"),
        (lambda w: (*w[:3], 60), "does not divide"),
    ],
    ids=["codes-dtype", "zeros-shape", "scales-dtype", "group"],
)
def test_packing_names_what_does_not_fit(kernels: KernelSet, change: object, complaint: str) -> None:
    assert callable(change)
    with pytest.raises(ConfigError, match=complaint):
        kernels.pack_int4(*change(int4(32, 128, 64)))


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    packed = kernels.pack_int4(*int4(32, 64, 64))
    x = torch.randn(2, 64)
    weight = torch.rand(63)
    with pytest.raises(GenerationError, match="weight"):
        kernels.norm_int4_linear(x, weight, 1e-5, packed)
    for operands in ((x[:, :32],), (x.double(),), (x, torch.randn(31)), (x, None, torch.randn(2, 31))):
        with pytest.raises(GenerationError, match="linear"):
            kernels.int4_linear(operands[0], packed, *operands[1:])
    with pytest.raises(GenerationError, match="linear"):
        kernels.int4_linear(x, packed, None, None, torch.empty(3, 32))
