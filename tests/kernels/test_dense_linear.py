"""Dense linear, the int8 grid of output heads, and reading rows of a packed weight."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.errors import ConfigError, GenerationError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import BuildError, find_compiler
from deepseek_tgi.kernels.select import KernelSet

# Either side of the 32-wide tile, K even and odd; rows either side of the 6-row register tile.
SHAPES = [(33, 31), (64, 64), (5, 1), (100, 577)]
ROWS = [0, 1, 2, 5, 6, 7, 13]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"M{m}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-K{s[1]}")
def test_equals_the_written_out_sum(
    any_kernels: KernelSet, shape: tuple[int, int], dtype: torch.dtype, rows: int
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)
    x, bias, residual = torch.randn(rows, shape[1]), torch.randn(shape[0]), torch.randn(rows, shape[0])
    y = any_kernels.dense_linear(x, any_kernels.pack_dense(weight), bias, residual)
    expected = oracle.linear(x.numpy(), weight.float().numpy(), bias.numpy(), residual.numpy())
    assert y.shape == expected.shape
    if rows == 0:
        return
    size = float((abs(x.numpy()) @ abs(weight.float().numpy()).T).max())
    # float32: as in test_int4_linear. bfloat16: weight, activation and result are each off by 2**-8 of themselves.
    exact = any_kernels.compute_dtype is ComputeDtype.FLOAT32
    bound = 4 * math.sqrt(shape[1]) * 2**-24 * size + 2**-22 if exact else 3 * 2**-8 * size + 2**-20
    assert abs(y.numpy() - expected).max() <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-K{s[1]}")
def test_packing_loses_nothing_in_float32(kernels: KernelSet, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = kernels.pack_dense(weight)
    assert torch.equal(packed.dense(), weight.float())
    ids = torch.tensor([shape[0] - 1, 0, 0])
    assert torch.equal(packed.rows(ids), weight[ids].float())


def test_sixteen_bit_weights_keep_their_bits_and_their_size(native: KernelSet) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(64, 64).to(dtype)
        packed = native.pack_dense(weight)
        assert torch.equal(packed.dense(), weight.float())
        assert packed.nbytes == weight.nbytes


@pytest.mark.parametrize("shape", [(100, 577), (64, 64)], ids=lambda s: f"N{s[0]}-K{s[1]}")
def test_a_row_has_the_same_bits_alone_and_in_a_batch(native: KernelSet, shape: tuple[int, int]) -> None:
    packed = native.pack_dense(torch.randn(shape))
    x = torch.randn(20, shape[1])
    whole = native.dense_linear(x, packed)
    for rows in ROWS[1:]:
        assert torch.equal(native.dense_linear(x[-rows:].contiguous(), packed), whole[-rows:]), rows


def q8_weight(n: int, k: int) -> torch.Tensor:
    """A weight as Q8_0 has it: 32 int8 codes, the largest 127, and one float16 scale."""
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (n, k // 32, 32), generator=g).float()
    codes[..., 5] = 127
    scales = (torch.rand(n, k // 32, 1, generator=g) * 0.01 + 0.001).half().float()
    return (codes * scales).view(n, k)


def test_a_head_on_an_int8_grid_is_stored_in_eight_bits(native: KernelSet) -> None:
    if native.compute_dtype is ComputeDtype.FLOAT32:
        pytest.skip("float32 compute keeps 16 bits or more")
    weight = q8_weight(2048, 576)
    packed = native.pack_dense(weight.half())
    assert packed.nbytes == 2048 * 576 * (1 + 2 / 32)
    # float16 moved each weight by 2**-11 of itself; the grid undoes that and adds no more.
    assert bool(((packed.dense() - weight).abs() <= 2**-11 * weight.abs()).all())
    ids = torch.tensor([2047, 3])
    assert torch.equal(packed.rows(ids), packed.dense()[ids])
    x = torch.randn(13, 576)
    y = native.dense_linear(x, packed)
    # Activations keep 15 bits of their block's largest of 32.
    expected = x.double() @ packed.dense().double().t()
    bound = x.view(13, -1, 32).abs().amax(-1).max() * 2**-15 * packed.dense().abs().sum(1).max()
    assert (y - expected).abs().max() <= bound
    for rows in (1, 4, 5):
        assert torch.equal(native.dense_linear(x[:rows].contiguous(), packed), y[:rows])


@pytest.mark.parametrize("kind", ["float32", "float16", "on a grid"])
def test_an_exact_weight_keeps_every_bit_in_every_precision(any_kernels: KernelSet, kind: str) -> None:
    weight = q8_weight(2048, 576) if kind == "on a grid" else torch.randn(40, 96).to(getattr(torch, kind))
    packed = any_kernels.pack_dense(weight, exact=True)
    assert torch.equal(packed.dense(), weight.float())
    x = torch.randn(5, weight.shape[1])
    y = any_kernels.dense_linear(x, packed)
    size = float((x.abs() @ weight.float().abs().t()).max())
    bound = 4 * math.sqrt(weight.shape[1]) * 2**-24 * size  # of float32 sums, as above
    assert (y - x.double() @ weight.double().t()).abs().max() <= bound


def test_any_other_head_keeps_sixteen_bits(native: KernelSet) -> None:
    weight = torch.randn(2048, 576).bfloat16()
    packed = native.pack_dense(weight)
    assert packed.nbytes == weight.nbytes
    assert torch.equal(packed.dense(), weight.float())


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    packed = kernels.pack_dense(torch.randn(32, 64))
    with pytest.raises(GenerationError, match=r"expected \[M, 64\] (bfloat16 or )?float32"):
        kernels.dense_linear(torch.randn(2, 63), packed)
    with pytest.raises(ConfigError, match="dense weight"):
        kernels.pack_dense(torch.ones(32, 64, dtype=torch.int32))


PACK_AND_MEASURE = """
import torch
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import BuildError, find_compiler
from deepseek_tgi.kernels.select import select_kernels

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

kernels = select_kernels("cpu", ComputeDtype.BFLOAT16, "native", 1)
codes = torch.randint(-127, 128, (32768, 16, 32), dtype=torch.int8)
codes[..., 0] = 127
weight = (codes * torch.rand(32768, 16, 1).half()).half().view(32768, 512)
if {on_grid}:
    expected = weight.numel()
else:
    weight[-1].normal_()  # the very last row does not lie on the grid
    expected = weight.nbytes
kernels.pack_dense(weight[:1024].clone())
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak_bytes()
packed = kernels.pack_dense(weight)
assert expected <= packed.nbytes < 1.2 * expected, (packed.nbytes, expected)
print((peak_bytes() - before) / weight.nbytes)
"""


@pytest.mark.parametrize("on_grid", [True, False], ids=["int8 grid", "off the grid"])
def test_packing_a_large_head_takes_little_beside_the_weight(on_grid: bool) -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    script = PACK_AND_MEASURE.format(on_grid=on_grid)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # The packed form (half the bytes of float16, or all of them), and the codes that were tried; the rest is chunks.
    assert float(done.stdout) < (1.3 if on_grid else 1.8)
