"""Launches of compiled forms, with a stand-in for Triton's compiler that tells what it was asked to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepseek_tgi.kernels.triton_launch import TritonLaunches


class Compiled:
    """One compiled form; `packed_metadata` is what marks one."""

    packed_metadata = ()

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self._launched = launched

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given: self._launched.append((self, grid, *given))


class Jit:
    """Compiles anew at every call."""

    arg_names = ("x", "n", "scale", "SIZE", "WIDE")

    def __init__(self) -> None:
        self.compiled: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def call(*given: Any, **named: Any) -> Compiled:
            self.compiled.append((given, named))
            return Compiled(self.launched)

        return call


MEMORY = torch.zeros(64)
FIRST = (MEMORY, 5, 0.5)
CONSTANTS, OPTIONS = {"WIDE": True, "SIZE": 8}, {"num_warps": 4}


def test_arguments_of_one_kind_are_compiled_for_once() -> None:
    jit = Jit()
    launches = TritonLaunches(jit)
    for given in (FIRST, (MEMORY[4:], 6, 0.25), (torch.zeros(64), 2**31 - 1, -1.0)):
        launches((1, 2, 3), given, CONSTANTS, OPTIONS, "key")
    assert [named for _, named in jit.compiled] == [CONSTANTS | OPTIONS]
    assert [launch[1] for launch in jit.launched] == [(1, 2, 3)] * 2
    assert [launch[3:] for launch in jit.launched] == [(6, 0.25, 8, True), (2**31 - 1, -1.0, 8, True)]
    assert jit.launched[0][2].data_ptr() == MEMORY[4:].data_ptr()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ((MEMORY[1:], 5, 0.5), "key"),
        ((MEMORY.bfloat16(), 5, 0.5), "key"),
        ((None, 5, 0.5), "key"),
        ((MEMORY, 1, 0.5), "key"),
        ((MEMORY, 32, 0.5), "key"),
        ((MEMORY, 2**31, 0.5), "key"),
        (FIRST, "another"),
    ],
    ids=["unaligned", "dtype", "none", "one", "multiple", "wide", "constants"],
)
def test_arguments_of_another_kind_are_compiled_for(given: tuple[Any, ...], key: str) -> None:
    jit = Jit()
    launches = TritonLaunches(jit)
    launches((1, 1, 1), FIRST, CONSTANTS, OPTIONS, "key")
    launches((1, 1, 1), given, CONSTANTS, OPTIONS, key)
    assert len(jit.compiled) == 2
    launches((1, 1, 1), FIRST, CONSTANTS, OPTIONS, "key")
    assert len(jit.compiled) == 2
