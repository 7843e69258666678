"""The sets of kernels under test: each implementation in each precision it has."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import PORTABLE_FLAGS, find_compiler
from deepseek_tgi.kernels.library import BuildError, load
from deepseek_tgi.kernels.select import KernelSet, native_kernels, select_kernels

THREADS = 2
EXACT = ComputeDtype.FLOAT32
NATIVE = ("native", "native-portable")


@cache
def make_kernels(name: str, compute_dtype: ComputeDtype) -> KernelSet:
    """The named set; skips the test where no compiler is."""
    before = torch.get_num_threads()
    try:
        if name not in NATIVE:
            return select_kernels("cpu", compute_dtype, name, THREADS)
        try:
            find_compiler()
        except BuildError as error:
            pytest.skip(str(error))
        return native_kernels(load(PORTABLE_FLAGS if name == NATIVE[1] else ()), compute_dtype, THREADS, "test")
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test sees the same numbers on every run."""
    torch.manual_seed(0)


@pytest.fixture(params=["reference", "torch", *NATIVE])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Every implementation, float32 compute."""
    return make_kernels(request.param, EXACT)


@pytest.fixture(params=[f"{name}-{dtype.value}" for name in NATIVE for dtype in ComputeDtype])
def native(request: pytest.FixtureRequest) -> KernelSet:
    """The native sets in both precisions: those that promise the same bits whatever the batch."""
    name, _, dtype = request.param.rpartition("-")
    return make_kernels(name, ComputeDtype(dtype))


@pytest.fixture
def native_exact() -> KernelSet:
    """The usual native set, float32 compute."""
    return make_kernels("native", EXACT)


@pytest.fixture(
    params=[
        f"{name}-{dtype.value}" for name in ("reference", "torch", *NATIVE) for dtype in ComputeDtype
        if name != "reference" or dtype is EXACT
    ]
)  # fmt: skip
def any_kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Every implementation in every precision."""
    name, _, dtype = request.param.rpartition("-")
    return make_kernels(name, ComputeDtype(dtype))
