"""The sizes that plans count with, against what the packing functions really make."""

from __future__ import annotations

import random

import pytest
import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels import compiler, held_bytes
from deepseek_tgi.kernels.common import ComputeDtype, Int4Tensors
from deepseek_tgi.kernels.held_bytes import HeldBytes, expected_kernels
from deepseek_tgi.kernels.int4_linear import layout
from deepseek_tgi.kernels.int4_linear.cpu import NibbleInt4
from deepseek_tgi.kernels.select import KernelSet, select_kernels

SETS = [(wish, compute) for wish in ("native", "torch", "reference") for compute in ComputeDtype]


@pytest.fixture(scope="module", params=SETS, ids=lambda s: f"{s[0]}-{s[1].value}")
def pair(request: pytest.FixtureRequest) -> tuple[KernelSet, HeldBytes]:
    wish, compute = request.param
    return select_kernels("cpu", compute, wish, 1), HeldBytes(wish, compute)


@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 160, 256, 384])
@pytest.mark.parametrize("scales", [torch.float16, torch.float32], ids=str)
def test_int4(pair: tuple[KernelSet, HeldBytes], group: int, scales: torch.dtype) -> None:
    kernels, sizes = pair
    for n in (16, 32, 40, 64, 72):
        k = group * random.Random(n).randint(1, 3)
        codes, zeros = torch.zeros(n, k, dtype=torch.uint8), torch.zeros(n, k // group, dtype=torch.uint8)
        # A third survives no 16-bit format, so that scales stored in 32 bits are kept in 32.
        packed = kernels.pack_int4(codes, zeros, torch.full((n, k // group), 1 / 3, dtype=scales), group)
        assert packed.nbytes == sizes.int4(n, k, group, scales.itemsize), (n, k)


@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 160, 256, 384])
@pytest.mark.parametrize("scales", [torch.float16, torch.float32], ids=str)
def test_int4_on_a_gpu(group: int, scales: torch.dtype) -> None:
    sizes = HeldBytes("cuda", ComputeDtype.BFLOAT16)
    for n in (16, 40, 64, 72):
        k = group * random.Random(n).randint(1, 3)
        codes, zeros = torch.zeros(n, k, dtype=torch.uint8), torch.zeros(n, k // group, dtype=torch.uint8)
        values = torch.full((n, k // group), 1 / 3, dtype=scales)
        fits = layout.kernel_group(group) is not None
        packed = (
            layout.pack(codes, zeros, values, group)
            if fits
            else NibbleInt4(Int4Tensors(codes, zeros, values, group), torch.bfloat16)
        )
        assert packed.nbytes == sizes.int4(n, k, group, scales.itemsize), (n, k)


def test_a_gpus_set_is_expected_where_one_computes() -> None:
    assert [expected_kernels(wish, on_gpu=True) for wish in ("auto", "triton", "torch")] == ["cuda", "triton", "torch"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dense(pair: tuple[KernelSet, HeldBytes], dtype: torch.dtype) -> None:
    kernels, sizes = pair
    for n, k in ((32, 64), (33, 65), (1, 7), (96, 128)):
        packed = kernels.pack_dense(torch.randn(n, k).to(dtype))
        assert packed.nbytes == sizes.dense(n, k, str(dtype).removeprefix("torch.")), (n, k)


def test_fp8(pair: tuple[KernelSet, HeldBytes]) -> None:
    kernels, sizes = pair
    for n, k, block in ((32, 256, 128), (40, 320, 128), (33, 64, 64)):
        codes = torch.zeros(n, k).to(torch.float8_e4m3fn)
        packed = kernels.pack_fp8(codes, torch.ones(n, -(-k // block)), block)
        assert packed.nbytes == sizes.fp8(n, k, block), (n, k, block)


def test_a_head_on_an_int8_grid() -> None:
    kernels, n, k = select_kernels("cpu", ComputeDtype.BFLOAT16, "native", 1), 4096 + 8, 256
    codes = torch.randint(-126, 127, (n, k // 32, 32), generator=torch.Generator().manual_seed(0)).float()
    codes[..., 0] = 127
    packed = kernels.pack_dense((codes * 0.0078125).view(n, k).half())
    assert packed.nbytes == HeldBytes("native", ComputeDtype.BFLOAT16).dense(n, k, "float16", on_grid=True)
    assert packed.nbytes < n * k * 2


def test_up_projection(pair: tuple[KernelSet, HeldBytes]) -> None:
    kernels, sizes = pair
    heads, nope, value, rank = 3, 32, 48, 64
    rows = heads * (nope + value)
    packed = kernels.pack_up(torch.randn(rows, rank), heads, nope)
    assert packed.nbytes == sizes.up_projection(rows, rank)


def test_the_expected_set_is_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for wish in ("auto", "native", "torch", "reference"):
        assert expected_kernels(wish) == select_kernels("cpu", ComputeDtype.FLOAT32, wish, 1).name
    monkeypatch.setattr(held_bytes, "find_compiler", lambda: compiler.find_compiler({"CXX": "no-such-compiler"}))
    assert expected_kernels("auto") == "torch"
    with pytest.raises(ConfigError, match="native was asked for, but no C\\+\\+ compiler"):
        expected_kernels("native")


@pytest.mark.parametrize("name", held_bytes.ITEM_BYTES)
def test_item_bytes_are_torchs(name: str) -> None:
    assert getattr(torch, name).itemsize == held_bytes.ITEM_BYTES[name]
