"""The CUDA sources' two ways to run: emulated here, compiled for a device by NVRTC."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms

from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.cuda import driver as driver_module
from deepseek_tgi.kernels.cuda import nvrtc
from deepseek_tgi.kernels.cuda.driver import DriverPrograms, LaunchPlace
from deepseek_tgi.kernels.cuda.program import KernelSpec, Tiles, spec

SIGNATURE = "plpfpli"


def norm(**macros: int) -> KernelSpec:
    """The norm of float32 rows, element by element."""
    return spec("rms_norm", "rms_norm", SIGNATURE, **{"RUNS": 0, "X_BF16": 0, "OUT_BF16": 0, **macros})


@pytest.mark.parametrize("width", [1, 31, 128, 300])
@pytest.mark.parametrize("threads", [32, 128])
def test_an_emulated_kernel_computes_what_its_source_says(width: int, threads: int) -> None:
    kernel = EmulatedPrograms().kernel(
        spec("rms_norm", "rms_norm", SIGNATURE, THREADS=threads, RUNS=0, X_BF16=0, OUT_BF16=0)
    )
    x, weight = torch.randn(5, width), torch.randn(width)
    out = torch.full((5, width), float("nan"))
    kernel((5, 1, 1), threads, (x, width, weight, 1e-5, out, width, width))
    rows = x.numpy().astype(np.float64)
    expected = rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-5) * weight.numpy()
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=1e-7)


def test_a_kernel_with_another_number_of_parameters_is_noticed() -> None:
    kernel = EmulatedPrograms().kernel(replace(norm(THREADS=32), signature="plpf"))
    with pytest.raises(AssertionError, match="takes 7 parameters"):
        kernel((1, 1, 1), 32, (torch.randn(1, 4), 4, torch.randn(4), 1e-5))


def test_machine_code_is_kept_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("DEEPSEEK_TGI_CACHE", str(tmp_path))
    wanted = norm(THREADS=128)
    code = nvrtc.machine_code(wanted, "sm_90a")
    assert code.startswith(b"\x7fELF")
    assert b"rms_norm" in code
    (kept,) = (tmp_path / "cuda").iterdir()
    kept.write_bytes(b"kept")
    assert nvrtc.machine_code(wanted, "sm_90a") == b"kept"
    other = nvrtc.machine_code(norm(THREADS=64), "sm_90a")
    assert other.startswith(b"\x7fELF")


def test_many_kernels_are_compiled_ahead_and_a_bad_one_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("DEEPSEEK_TGI_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_WORTH_PROCESSES", 2)
    good = spec("rms_norm", "rms_norm", SIGNATURE, THREADS=128, X_BF16=0, OUT_BF16=1)
    nvrtc.compile_all([good, good, spec("rms_norm", "rms_norm", SIGNATURE, THREADS=128)], "sm_90a")
    (kept,) = (tmp_path / "cuda").iterdir()
    assert kept.read_bytes() == nvrtc.machine_code(good, "sm_90a")


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(DeviceError, match=r'(?s)rms_norm.*sm_90a.*"X_BF16" is undefined'):
        nvrtc.compile_source(spec("rms_norm", "rms_norm", SIGNATURE, THREADS=128, RUNS=0), "sm_90a")


def test_a_function_keeps_the_most_shared_memory_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    asked: list[int] = []

    def ask(function: object, attribute: object, value: int) -> tuple[int]:
        asked.append(value)
        return (0,)

    monkeypatch.setattr(driver, "cuModuleGetFunction", lambda module, name: (0, "the one function"))
    monkeypatch.setattr(driver, "cuFuncSetAttribute", ask)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(DriverPrograms, "_module", lambda self, spec: "its module")
    programs = DriverPrograms(torch.device("cpu"))
    for shared_bytes in (
        36_000,
        60_000,
        200_000,
        100_000,
        1_000,
    ):  # even the first may be too much beside what is fixed
        programs.kernel(spec("rms_norm", "rms_norm", SIGNATURE, shared_bytes, THREADS=128, X_BF16=0, OUT_BF16=1))
    assert asked == [36_000, 60_000, 200_000, 200_000, 200_000]


def test_parameters_lie_where_the_driver_is_told() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    x = torch.arange(3)
    place = LaunchPlace(spec("any", "any", "ipflipil", 77), driver)
    given = (-5, x, 0.5, -(1 << 40), 7, None, 2**31 - 1, 3)
    for _ in range(2):
        place.write(given)
    kinds: tuple[Any, ...] = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_float,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
    )
    addresses = (ctypes.c_void_p * 8).from_address(place.pointers)
    found = [kind.from_address(at).value for kind, at in zip(kinds, addresses, strict=True)]
    assert found == [-5, x.data_ptr(), 0.5, -(1 << 40), 7, None, 2**31 - 1, 3]
    assert all(at % ctypes.sizeof(kind) == 0 for kind, at in zip(kinds, addresses, strict=True))
    with pytest.raises(AssertionError, match="any: 1 arguments for"):
        place.write((1,))
    assert (place.plain.sharedMemBytes, place.plain.numAttrs, place.overlapping.numAttrs) == (77, 0, 1)
    overlap = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert place.overlapping.attrs[0].id == overlap
    assert place.overlapping.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_a_matrix_read_in_tiles_is_described_among_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    x, asked = torch.zeros(6, 80, dtype=torch.bfloat16)[:, 8:72], []

    def describe(*wanted: object) -> bytes:
        asked.append(wanted)
        return bytes(range(128))

    monkeypatch.setattr(driver_module, "_tile_map", describe)
    place = LaunchPlace(spec("any", "any", "itp"), driver)
    place.write((9, Tiles(x, (32, 64)), x))
    addresses = (ctypes.c_uint64 * 3).from_address(place.pointers)
    assert ctypes.string_at(addresses[1], 128) == bytes(range(128))
    assert ctypes.c_void_p.from_address(addresses[2]).value == x.data_ptr()
    assert asked == [(x.data_ptr(), 2, (6, 64), (80, 1), (32, 64))]


def test_a_tile_map_is_kept_until_its_memory_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    x, asked = torch.zeros(6, 64, dtype=torch.bfloat16), []

    def describe(address: int, *_: object) -> bytes:
        asked.append(address)
        return bytes([len(asked)] * 128)

    monkeypatch.setattr(driver_module, "_tile_map", describe)
    place, tiles = LaunchPlace(spec("any", "any", "t"), driver), Tiles(x, (32, 64))
    written = (ctypes.c_uint64 * 1).from_address(place.pointers)
    first = x.data_ptr()
    for _ in range(2):
        place.write((tiles,))
    assert ctypes.string_at(written[0], 1) == b"\1"
    x.set_(torch.zeros_like(x))  # type: ignore[call-overload]
    place.write((tiles,))
    assert ctypes.string_at(written[0], 1) == b"\2"
    assert asked == [first, x.data_ptr()]
    assert first != x.data_ptr()


def test_a_kernel_is_found_by_an_equal_description_in_another_process_too() -> None:
    wanted = norm(THREADS=128)
    assert wanted == replace(norm(THREADS=64), defines=wanted.defines)
    assert hash(wanted) == hash(replace(norm(THREADS=64), defines=wanted.defines))
    assert wanted != replace(wanted, beside=True)
    code = (
        "import pickle, sys\n"
        "from deepseek_tgi.kernels.cuda.program import spec\n"
        "own = spec('rms_norm', 'rms_norm', 'plpfpli', RUNS=0, X_BF16=0, OUT_BF16=0, THREADS=128)\n"
        "print({own: 'found'}[pickle.load(sys.stdin.buffer)])\n"
    )
    told, given = [sys.executable, "-c", code], pickle.dumps(wanted)
    for seed in ("1", "2"):  # strings hash otherwise in each
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(told, input=given, env=env, capture_output=True, check=False)
        assert done.stdout == b"found\n", done.stderr
