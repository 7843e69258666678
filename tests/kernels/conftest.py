"""The sets of kernels under test: each implementation in each precision it has."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from emulation.emulated import EmulatedPrograms

from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.compiler import AVX2_FLAGS, PORTABLE_FLAGS, find_compiler
from deepseek_tgi.kernels.library import BuildError, load
from deepseek_tgi.kernels.rms_norm.cuda import CudaRmsNorm
from deepseek_tgi.kernels.rope.cuda import CudaRope
from deepseek_tgi.kernels.route.cuda import CudaRoute
from deepseek_tgi.kernels.select import KernelSet, native_kernels, select_kernels
from deepseek_tgi.kernels.silu_mul.cuda import CudaSiluMul

THREADS = 2
EXACT = ComputeDtype.FLOAT32
BUILDS: dict[str, tuple[str, ...]] = {"native": (), "native-portable": PORTABLE_FLAGS}
"""The native library's builds and their flags: for this machine, for any, and, where this one has more, for AVX2."""
if " avx512f " in Path("/proc/cpuinfo").read_text():
    BUILDS["native-avx2"] = AVX2_FLAGS
NATIVE = tuple(BUILDS)
EMULATED = "emulated"
"""The row ops of the GPU's set, their kernels emulated; the rest are torch's."""


@cache
def make_kernels(name: str, compute_dtype: ComputeDtype) -> KernelSet:
    """The named set; skips the test where no compiler is."""
    if name == EMULATED:
        return emulated_row_ops(make_kernels("torch", compute_dtype))
    before = torch.get_num_threads()
    try:
        if name not in NATIVE:
            return select_kernels("cpu", compute_dtype, name, THREADS)
        try:
            find_compiler()
        except BuildError as error:
            pytest.skip(str(error))
        return native_kernels(load(BUILDS[name]), compute_dtype, THREADS, "test")
    finally:
        torch.set_num_threads(before)


def emulated_row_ops(rest: KernelSet) -> KernelSet:
    """`rest` with the ops on rows as a GPU runs them."""
    programs = EmulatedPrograms()
    return replace(
        rest,
        name=EMULATED,
        rms_norm=CudaRmsNorm(programs, torch.float32),
        rope=CudaRope(programs),
        silu_mul=CudaSiluMul(programs),
        route=CudaRoute(programs),
    )


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test sees the same numbers on every run."""
    torch.manual_seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kernels` is every implementation; a module whose ops run emulated says so as `ALSO`."""
    if "kernels" in metafunc.fixturenames:
        names = ["reference", "torch", *NATIVE, *getattr(metafunc.module, "ALSO", ())]
        metafunc.parametrize("kernels", names, indirect=True)


@pytest.fixture
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
