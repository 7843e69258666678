"""Kernels of the CUDA sources on a machine without a GPU: compiled as plain C++ and run thread by thread.

`EmulatedPrograms` is a `Programs` like the device's own, over CPU tensors, so ops run in tests unchanged.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deepseek_tgi.kernels.compiler import find_compiler
from deepseek_tgi.kernels.cuda.program import SOURCE_FOLDER, Argument, Kernel, KernelSpec, Shape, Tiles

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-DDEEPSEEK_TGI_EMULATED", "-ffp-contract=off")
TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
MAX_SHARED_BYTES = 232_448


class EmulatedKernel:
    """One kernel; a call returns when all its blocks have run. Every tensor must be on the CPU."""

    def __init__(self, spec: KernelSpec, library: Path) -> None:
        assert spec.shared_bytes <= MAX_SHARED_BYTES, f"{spec.name}: {spec.shared_bytes} bytes of shared memory"
        self._spec = spec
        self._run = getattr(ctypes.CDLL(str(library)), f"emulate_{spec.name}")

    def __call__(self, grid: Shape, block: int, arguments: Sequence[Argument], *, overlap: bool = False) -> None:
        """See `Kernel`."""
        kinds = self._spec.signature
        assert len(arguments) == len(kinds), f"{self._spec.name}: {len(arguments)} arguments for {kinds!r}"
        slots = [_slot(kind, value) for kind, value in zip(kinds, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(slot) for slot in slots))
        wanted = self._run(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(block, 1, 1), ctypes.byref(pointers), len(slots)
        )
        assert wanted < 0, f"{self._spec.name} takes {wanted} parameters, its signature has {len(slots)}"


class EmulatedPrograms:
    """See the module's docstring."""

    def kernel(self, spec: KernelSpec) -> Kernel:
        """See `Programs`."""
        return _kernel(spec)


@cache
def _kernel(spec: KernelSpec) -> EmulatedKernel:
    return EmulatedKernel(spec, _library(spec))


def _slot(kind: str, value: Argument) -> Any:
    if isinstance(value, Tiles):
        x, size = value.tensor, value.tensor.element_size()
        strides = [stride * size for stride in x.stride()]
        assert x.data_ptr() % 16 == 0
        assert all(stride % 16 == 0 for stride in strides[:-1])
        assert size == strides[-1]
        assert x.dim() == len(value.box) <= 3
        more = [1] * (3 - x.dim())
        said = (x.data_ptr(), size, *more, *x.shape, *more, *strides, *more, *value.box)
        return (ctypes.c_uint64 * 16)(*said)  # emulation.h's `tile_map`
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cpu"
        value = value.data_ptr()
    return TYPES[kind](0 if value is None else value)


def _library(spec: KernelSpec) -> Path:
    """The source's kernels as a shared library, built once for its macros."""
    state = hashlib.sha256()
    for source in sorted([*SOURCE_FOLDER.iterdir(), *HERE.glob("*.h")]):
        if source.is_file():
            state.update(source.name.encode() + source.read_bytes())
    state.update(repr((spec.source, spec.flags, FLAGS)).encode())
    folder = Path(tempfile.gettempdir()) / f"deepseek-tgi-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{spec.source}-{state.hexdigest()[:20]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work) / target.name
            source = SOURCE_FOLDER / f"{spec.source}.cu"
            command = [find_compiler(), *FLAGS, *spec.flags, f"-I{SOURCE_FOLDER}", f"-I{HERE}"]
            done = subprocess.run(
                [*command, "-x", "c++", str(source), "-o", str(built)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{spec.name}: {done.stderr[:4000]}"
            built.replace(target)
    return target
