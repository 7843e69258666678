"""Compiles kernel sources with NVRTC and keeps the machine code in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.compiler import cache_folder
from deepseek_tgi.kernels.cuda.program import SOURCE_FOLDER, KernelSpec

logger = logging.getLogger(__name__)

_WORTH_PROCESSES = 8
"""Fewer kernels are compiled sooner than processes start."""
_FLAGS = ("-std=c++17", "-default-device", "-lineinfo")


def arch_of(major: int, minor: int) -> str:
    """NVRTC's name for a compute capability; Hopper's own instructions need the `a`."""
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def machine_code(spec: KernelSpec, arch: str) -> bytes:
    """The cubin of the kernel's source for `arch`, from the cache or compiled now (about a second).

    Raises `DeviceError` with the compiler's own words.
    """
    kept = _kept(spec, arch)
    try:
        return kept.read_bytes()
    except OSError:
        pass
    code = compile_source(spec, arch)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, kept)  # whole or not at all: others may be reading
    except OSError as error:
        logger.warning("cache folder %s: %s; kernels are compiled at every start", kept.parent, error)
    return code


def compile_all(specs: Iterable[KernelSpec], arch: str) -> None:
    """Fill the cache with the kernels of `specs`, in processes on all cores: one after the other they take minutes.

    What does not compile is left for its first use to say so.
    """
    missing = list(
        {(spec.source, spec.name, spec.flags): spec for spec in specs if not _kept(spec, arch).exists()}.values()
    )
    if len(missing) < _WORTH_PROCESSES:
        return
    workers = min(len(os.sched_getaffinity(0)), len(missing))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(machine_code, spec, arch) for spec in missing]:
            done.exception()


def compile_source(spec: KernelSpec, arch: str) -> bytes:
    """The kernel's cubin, compiled now."""
    from cuda.bindings import nvrtc

    source = (SOURCE_FOLDER / f"{spec.source}.cu").read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source, f"{spec.source}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={arch}", f"-I{SOURCE_FOLDER}", *_FLAGS, *spec.flags]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    try:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise DeviceError(f"kernel {spec.name} ({' '.join(spec.flags)}) for {arch}: {log.decode(errors='replace')}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        nvrtc.nvrtcGetCUBIN(program, code)
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(result: tuple[Any, ...]) -> Any:
    status, value = result
    if int(status):
        raise DeviceError(f"NVRTC: {status.name}")
    return value


def _kept(spec: KernelSpec, arch: str) -> Path:
    state = hashlib.sha256(_sources_and_compiler())
    for part in (spec.source, arch, *_FLAGS, *spec.flags):
        state.update(part.encode() + b"\0")
    return cache_folder() / "cuda" / f"{spec.source}-{arch}-{state.hexdigest()[:20]}.cubin"


@cache
def _sources_and_compiler() -> bytes:
    from cuda.bindings import nvrtc

    state = hashlib.sha256(repr(nvrtc.nvrtcVersion()).encode())
    for source in sorted(SOURCE_FOLDER.iterdir()):
        if source.suffix in {".cu", ".cuh"}:
            state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return state.digest()
