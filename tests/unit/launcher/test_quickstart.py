"""What quickstart says while it waits."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from deepseek_tgi.launcher import quickstart


class Waiting:
    """A child that runs, and a user who gives up at the third look."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def exit_code(self) -> None:
        return None

    def stopping(self) -> bool:
        return next(self._looks) >= 3


def said_while_waiting(free_port: int, *lines: bytes) -> list[str]:
    said: list[str] = []
    waiting: Any = Waiting()
    wish = quickstart.Wish("demo", free_port, "?", leave=True)
    assert not quickstart._wait_healthy(wish, waiting, waiting, deque(lines), said.append)
    return said


def test_a_first_start_that_compiles_says_so_once(free_port: int) -> None:
    line = b"2026-01-01T00:00:00Z  INFO deepseek_tgi.launcher.shard: compiling the native kernels with g++, once\n"
    assert said_while_waiting(free_port, line) == ["(compiling the kernels for this machine, once) … "]


def test_a_start_with_kernels_says_nothing(free_port: int) -> None:
    assert said_while_waiting(free_port, b"INFO deepseek_tgi.launcher.shard: state starting -> loading\n") == []
