"""The INT4 kernels of the GPU: in the emulator here, on a device under the marker `gpu`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms
from oracles import kernels as oracle

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.cuda.machine import Machine
from deepseek_tgi.kernels.int4_linear import cuda, cuda_fused, dequantised, layout, panel, stream, wide
from deepseek_tgi.kernels.int4_linear.choice import Chooser
from deepseek_tgi.kernels.int4_linear.panel import PanelShape
from deepseek_tgi.kernels.int4_linear.stream import StreamShape
from deepseek_tgi.kernels.int4_linear.wide import WideShape

MACHINE = Machine(EmulatedPrograms(), 3, 90)

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


def bound(x: oracle.Array, w: Int4) -> oracle.Array:
    """What float32 sums of exact products may be off by. A code enters as 128 + code, at most 143, and what is too much
    is taken off: K additions, each within 2**-23 of the running sum, seldom beyond twice the root of K of them."""
    scales = w[2].double().numpy().repeat(w[3], 1)
    least: oracle.Array = 2 * math.sqrt(x.shape[1]) * 2**-23 * 143 * (np.abs(x) @ scales.T) + 2**-22 * 10
    return least


def sums_bound(x: oracle.Array, weight: oracle.Array) -> oracle.Array:
    """The same where codes enter as they are."""
    least: oracle.Array = 2 * math.sqrt(x.shape[1]) * 2**-24 * (np.abs(x) @ np.abs(weight).T) + 2**-22 * 10
    return least


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 128, 128), torch.float16),
        ((33, 192, 64), torch.float32),
        ((48, 96, 32), torch.bfloat16),
        ((16, 576, 576), torch.float32),
        ((1, 32, 32), torch.bfloat16),
        ((130, 384, 96), torch.bfloat16),
    ],
    ids=str,
)
def test_packing_loses_nothing(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    w = int4(*shape, dtype)
    packed = layout.pack(*w)
    expected = written_out(w)
    # One float32 rounding of an exact difference times a scale.
    assert abs(packed.dequantise().numpy() - expected).max() <= 2**-24 * abs(expected).max()
    wide = dequantised.dequantise(EmulatedPrograms(), packed, torch.float32)
    assert torch.equal(wide, packed.dequantise())
    read = packed.tensors()
    for got, given in zip((read.codes, read.zeros, read.scales), w[:3], strict=True):
        assert torch.equal(got, given)
        assert got.dtype == given.dtype or got.dtype == torch.float16  # bfloat16 that float16 holds exactly
    narrow = dequantised.dequantise(EmulatedPrograms(), packed, torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())


def test_what_cannot_be_packed_is_named() -> None:
    codes, zeros, scales, group = int4(16, 48, 24)
    assert layout.refusal(layout.Int4Tensors(codes, zeros, scales, group)) == "group size 24 is no multiple of 32"
    assert layout.refusal(layout.Int4Tensors(*int4(16, 64, 32))) is None


STREAMS = [
    ((80, 640, 128), 1, StreamShape(split=2, depth=3, warps=4)),
    ((33, 192, 64), 8, StreamShape(split=1, depth=2, warps=2)),
    ((200, 160, 32), 5, StreamShape(row_tiles=2, split=2, depth=4, warps=2)),
    ((64, 512, 128), 9, StreamShape(row_tiles=2, split=4, depth=2, warps=4)),
    ((70, 1152, 64), 32, StreamShape(row_tiles=4, split=2, depth=2, warps=4, cluster=4)),
    ((200, 512, 128), 13, StreamShape(split=2, depth=3, warps=8, together=1)),
    ((64, 160, 32), 32, StreamShape(split=1, depth=2, warps=4, cluster=2, together=1)),
]


@pytest.mark.parametrize(("size", "rows", "shape"), STREAMS, ids=str)
def test_stream_equals_the_written_out_sum(size: tuple[int, int, int], rows: int, shape: StreamShape) -> None:
    torch.manual_seed(rows)
    w = int4(*size)
    x = torch.randn(rows, size[1]).bfloat16()
    bias, residual = torch.randn(size[0]), torch.randn(rows, size[0])
    weight = written_out(w)
    expected = oracle.linear(x.float().numpy(), weight, bias.numpy(), residual.numpy())
    out = torch.full((rows, size[0]), float("nan"))
    stream.launch(MACHINE, shape, x, layout.pack(*w), out, bias=bias, residual=residual)
    assert (abs(out.numpy() - expected) <= bound(x.float().numpy(), w)).all()


@pytest.mark.parametrize("rows", [0, 1, 33], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("group_size", [24, 32], ids=lambda g: f"g{g}")
def test_the_op_takes_what_the_kernels_do_not(rows: int, group_size: int) -> None:
    w = int4(40, 96, group_size)
    packed = cuda.Packer(torch.device("cpu"))(*w)
    x, bias, residual = torch.randn(rows, 96), torch.randn(40), torch.randn(rows, 40)
    y = cuda.Int4Ops(MACHINE, Chooser((), 3, 90)).int4_linear(x, packed, bias, residual)
    assert y.dtype == torch.float32
    rounded, weight = x.bfloat16().float().numpy(), written_out(w)
    expected = oracle.linear(rounded, weight, bias.numpy(), residual.numpy())
    # Beyond the kernels weights are rounded to bfloat16, by 2**-8 of each at most.
    assert (abs(y.numpy() - expected) <= 2**-8 * (abs(rounded) @ abs(weight).T) + 2**-22 * 10).all()


def test_operands_that_do_not_fit_are_refused() -> None:
    ops, packed = cuda.Int4Ops(MACHINE, Chooser((), 3, 90)), layout.pack(*int4(32, 64, 64))
    x = torch.randn(2, 64)
    for operands in ((x[:, :32],), (x.double(),), (x, torch.randn(31)), (x, None, torch.randn(2, 31))):
        with pytest.raises(GenerationError, match="linear"):
            ops.int4_linear(operands[0], packed, *operands[1:])
    with pytest.raises(GenerationError, match="contiguous"):
        ops.int4_linear(x, packed, None, None, torch.empty(32, 2).t())


PANELS = [
    ((64, 128, 128), 16, torch.float16, PanelShape(tokens=16, warpgroups=1, stages=3)),
    ((130, 192, 64), 5, torch.bfloat16, PanelShape(tokens=16, warpgroups=2, stages=4)),
    ((33, 608, 32), 37, torch.float32, PanelShape(tokens=32, warpgroups=1, stages=5, cluster=2)),
    ((192, 640, 128), 70, torch.float16, PanelShape(tokens=64, warpgroups=2, stages=4)),
    ((64, 256, 128), 130, torch.float16, PanelShape(tokens=128, warpgroups=1, stages=3, cluster=2)),
]


WIDES = [
    ((33, 608, 32), 37, torch.float32, WideShape(tokens=32, warpgroups=1, stages=5, cluster=2)),
    ((300, 352, 32), 20, torch.float16, WideShape(tokens=32, warpgroups=1, stages=3, sharers=4)),
    ((64, 768, 128), 130, torch.float16, WideShape(tokens=128, warpgroups=1, stages=3, cluster=2)),
    ((130, 384, 64), 260, torch.float16, WideShape(tokens=256, warpgroups=2, stages=4)),
    ((600, 192, 64), 200, torch.bfloat16, WideShape(tokens=128, warpgroups=1, stages=4, sharers=2)),
]

EXACT = [
    ((64, 128, 128), 16, torch.float16, WideShape(tokens=16, warpgroups=1, stages=3)),
    ((456, 128, 128), 45, torch.float16, WideShape(tokens=16, warpgroups=1, stages=3)),
    ((456, 512, 128), 45, torch.float16, WideShape(tokens=16, warpgroups=1, stages=3, sharers=2)),
    ((600, 192, 64), 70, torch.bfloat16, WideShape(tokens=64, warpgroups=2, stages=3)),
    ((700, 640, 64), 300, torch.bfloat16, WideShape(tokens=64, warpgroups=1, stages=4, sharers=2)),
    ((130, 768, 128), 100, torch.float32, WideShape(tokens=64, warpgroups=1, stages=3, cluster=2, sharers=2)),
]


@pytest.mark.parametrize(("size", "rows", "dtype", "shape"), EXACT, ids=str)
def test_wide_of_few_tokens_equals_the_written_out_sum(
    size: tuple[int, int, int], rows: int, dtype: torch.dtype, shape: WideShape
) -> None:
    torch.manual_seed(rows)
    w = int4(*size, dtype)
    x = torch.randn(rows, size[1]).bfloat16()
    bias, residual = torch.randn(size[0]), torch.randn(rows, size[0])
    weight = written_out(w)
    expected = oracle.linear(x.float().numpy(), weight, bias.numpy(), residual.numpy())
    out = torch.full((rows, size[0]), float("nan"))
    wide.launch(MACHINE, shape, x, layout.pack(*w), out, bias=bias, residual=residual)
    # Products are of exact integers, scaled a group at a time.
    assert (abs(out.numpy() - expected) <= 2 * sums_bound(x.float().numpy(), weight)).all()


@pytest.mark.parametrize(("size", "rows", "dtype", "shape"), [*PANELS, *WIDES], ids=str)
def test_panels_equal_the_sum_over_rounded_weights(
    size: tuple[int, int, int], rows: int, dtype: torch.dtype, shape: PanelShape | WideShape
) -> None:
    torch.manual_seed(rows)
    w = int4(*size, dtype)
    x = torch.randn(rows, size[1]).bfloat16()
    bias, residual = torch.randn(size[0]), torch.randn(rows, size[0])
    weight = written_out(w)
    expected = oracle.linear(x.float().numpy(), weight, bias.numpy(), residual.numpy())
    rounded = oracle.linear(x.float().numpy(), torch.from_numpy(weight).bfloat16().double().numpy(), None, None)
    out = torch.full((rows, size[0]), float("nan"))
    if isinstance(shape, WideShape):
        wide.launch(MACHINE, shape, x, layout.pack(*w), out, bias=bias, residual=residual)
    else:
        panel.launch(MACHINE, shape, x, layout.pack(*w), out, bias=bias, residual=residual)
    # A weight is rounded to bfloat16, 2**-8 of it at most; a scale enters as two bfloat16, 2**-17 of it off at most.
    most = (2**-8 + 2**-16) * (abs(x.float().numpy()) @ abs(weight).T) + sums_bound(x.float().numpy(), weight)
    assert (abs(out.numpy() - expected) <= most).all()
    # Nearly every weight is rounded as the oracle rounds it.
    off = abs(out.numpy() - bias.numpy() - residual.numpy() - rounded)
    assert np.sqrt((off**2).mean()) < 2**-12 * np.sqrt((rounded**2).mean())


@pytest.mark.parametrize("n", [40, 37], ids=lambda n: f"N{n}")
def test_panel_rounds_its_float32_to_bfloat16(n: int) -> None:
    torch.manual_seed(n)
    packed, x = layout.pack(*int4(n, 128, 64)), torch.randn(17, 128).bfloat16()
    wide, narrow = torch.full((17, n), float("nan")), torch.full((17, n), float("nan"), dtype=torch.bfloat16)
    shape = PanelShape(tokens=16, warpgroups=1, stages=3)
    panel.launch(MACHINE, shape, x, packed, wide)
    panel.launch(MACHINE, shape, x, packed, narrow)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("n", [40, 37], ids=lambda n: f"N{n}")
def test_wide_sums_are_rounded_to_bfloat16_once(n: int) -> None:
    torch.manual_seed(n)
    packed, x = layout.pack(*int4(n, 128, 64)), torch.randn(17, 128).bfloat16()
    sums, narrow = torch.full((17, n), float("nan")), torch.full((17, n), float("nan"), dtype=torch.bfloat16)
    shape = WideShape(tokens=16, warpgroups=1, stages=3)
    wide.launch(MACHINE, shape, x, packed, sums)
    wide.launch(MACHINE, shape, x, packed, narrow)
    assert torch.equal(narrow, sums.bfloat16())


def test_a_weight_that_was_multiplied_before_is_multiplied_alike() -> None:
    """By other numbers of rows, into another dtype, on another device, and where it was put in the meantime."""
    w = int4(130, 256, 64)
    weight, packed = written_out(w), layout.pack(*w)
    other = Machine(EmulatedPrograms(), 7, 90)
    shapes = WideShape(tokens=64, warpgroups=1, stages=3), WideShape(tokens=32, warpgroups=2, stages=3)
    for rows, dtype, machine, shape in (
        (70, torch.float32, MACHINE, shapes[0]), (5, torch.float32, MACHINE, shapes[0]),
        (70, torch.bfloat16, MACHINE, shapes[0]), (70, torch.float32, other, shapes[0]),
        (70, torch.float32, other, shapes[1]), (70, torch.float32, MACHINE, shapes[0]),
    ):  # fmt: skip
        torch.manual_seed(rows)
        x, residual = torch.randn(rows, 256).bfloat16(), torch.randn(rows, 130)
        out = torch.full((rows, 130), float("nan"), dtype=dtype)
        wide.launch(machine, shape, x, packed, out, residual=residual)
        expected = oracle.linear(x.float().numpy(), weight, None, residual.numpy())
        most = 2 * sums_bound(x.float().numpy(), weight) + (2**-8 * abs(expected) if dtype == torch.bfloat16 else 0)
        assert (abs(out.double().numpy() - expected) <= most).all()
        for tensor in (packed.codes, packed.metas):  # as sleeping and waking do
            kept, storage = tensor.clone(), tensor.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
            tensor.copy_(kept)


def test_norm_and_activation_before_the_product() -> None:
    torch.manual_seed(0)
    w = int4(40, 256, 64)
    packed, weight = layout.pack(*w), written_out(w)
    ops = cuda.Int4Ops(MACHINE, Chooser((), 3, 90))
    fused = cuda_fused.FusedOps(ops, _never, _never)
    x, norm, bias = torch.randn(2, 256) * 3, torch.rand(256) + 0.5, torch.randn(40)
    y = fused.norm_int4_linear(x, norm, 1e-5, packed, bias=bias)
    normed = oracle.rms_norm(x.numpy(), norm.numpy(), 1e-5)
    # What is multiplied is rounded to bfloat16, by 2**-8 of each at most.
    assert (
        abs(y.numpy() - oracle.linear(normed, weight, bias.numpy())) <= 2**-7.9 * (abs(normed) @ abs(weight).T)
    ).all()
    gate_up, residual = torch.randn(3, 512).bfloat16(), torch.randn(3, 40)
    y = fused.silu_int4_linear(gate_up, packed, None, residual)
    gated = oracle.silu_mul(gate_up.double().numpy())
    expected = oracle.linear(gated, weight, None, residual.numpy())
    assert (abs(y.numpy() - expected) <= 2**-7.9 * (abs(gated) @ abs(weight).T)).all()


def _never(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("the kernel takes this")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_rows_are_handed_on_where_vectors_can_be_read(rows: int, first: int) -> None:
    """A single row counts as contiguous wherever it begins, and a copy that is none is read off its boundary."""
    x = torch.randn(rows, 40)[:, first : first + 32]
    given = cuda.in_vectors(x)
    assert torch.equal(given, x)
    assert given.data_ptr() % 16 == 0
    assert given.stride(0) * given.element_size() % 16 == 0
    assert (given.data_ptr() == x.data_ptr()) == (first != 1), "copied only where it must be"
