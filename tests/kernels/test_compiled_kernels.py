"""Every kernel that ships, compiled for its GPUs: registers, spills and the instructions it was written for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compiled.kernels import (
    ALONE,
    CONSTANT_READ,
    EARLY,
    EARLY_LOAD,
    HOPPER,
    MOST_SHARED,
    Compiled,
    CudaKernel,
    TritonKernel,
    compile_cuda,
    compile_triton,
    disassemble,
)

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "compiled"
OPS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in {"kernels", "compile_triton"})
MAX_THREAD_REGISTERS = 255


def listed(kind: str) -> Iterator[Any]:
    for op in OPS:
        yield from getattr(importlib.import_module(f"compiled.{op}"), kind, ())


CUDA: list[tuple[CudaKernel, str]] = [(kernel, arch) for kernel in listed("CUDA") for arch in kernel.archs]
TRITON: list[tuple[TritonKernel, str]] = [(kernel, arch) for kernel in listed("TRITON") for arch in kernel.archs]


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, int]]:
    """All Triton kernels, compiled together: starting torch and Triton costs more than a kernel."""
    return compile_triton(list(listed("TRITON")), tmp_path_factory.mktemp("cubins"))


def check(kernel: CudaKernel | TritonKernel, compiled: Any) -> None:
    assert compiled.registers <= min(kernel.max_registers, MAX_THREAD_REGISTERS)
    if getattr(kernel, "tuned", True):
        assert compiled.stack_bytes == 0, "spills, or an array that is indexed at run time"
        assert not compiled.count(r"(LDL|STL).*"), "spills"
    for pattern in kernel.must:
        assert compiled.count(pattern), f"no {pattern} among {sorted(compiled.instructions)}"
    for pattern in kernel.must_not:
        assert not compiled.count(pattern), f"{pattern} is there"
    for pattern, most in getattr(kernel, "at_most", ()):
        assert compiled.count(pattern) <= most, f"{pattern}: {compiled.count(pattern)}"


def check_order(name: str, compiled: Compiled) -> None:
    """A kernel that is launched while the one ahead still runs waits for it before it reads what that one writes."""
    if name in ALONE:
        return
    assert compiled.early is not None, "it does not wait for the kernel ahead of it"
    allowed = CONSTANT_READ if name in EARLY else "nothing"
    moved = [instruction for instruction in compiled.early if not re.fullmatch(allowed, instruction)]
    assert not moved, f"{moved} ahead of the wait for the kernel that writes what they read"


@pytest.mark.parametrize(("kernel", "arch"), CUDA, ids=[f"{kernel}-{arch}" for kernel, arch in CUDA])
def test_cuda_kernel(kernel: CudaKernel, arch: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    compiled = compile_cuda(kernel.spec, arch, tmp_path)
    check(kernel, compiled)
    if arch == HOPPER:
        check_order(kernel.spec.name, compiled)
        loads = [instruction for instruction in compiled.early or () if re.fullmatch(EARLY_LOAD, instruction)]
        assert len(loads) >= kernel.ahead, "the compiler moved loads behind the wait for the kernel ahead"


@pytest.mark.parametrize(("kernel", "arch"), TRITON, ids=[f"{kernel}-{arch}" for kernel, arch in TRITON])
def test_triton_kernel(kernel: TritonKernel, arch: str, cubins: dict[tuple[str, str], tuple[Path, int]]) -> None:
    cubin, shared = cubins[str(kernel), arch]
    check(kernel, disassemble(cubin))
    assert shared <= MOST_SHARED[arch]
