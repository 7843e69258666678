"""Measurements that nobody else disturbed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from tests.benchmarks.measure import idle_share, with_foreign_share

T = TypeVar("T")

MAX_FOREIGN, MAX_ATTEMPTS, MAX_WAITS = 0.04, 30, 60


class Quiet:
    """Repeats what was disturbed: somebody else used more than `MAX_FOREIGN` of the processors meanwhile.

    Two sides do not suffer alike from a third: llama.cpp's threads spin while they wait for each other, and fall to a
    tenth where ours fall to a half. A median over disturbed rounds would be no figure for either.
    """

    def __init__(self, required: bool) -> None:
        self.required = required
        self.discarded = 0

    def run(self, measure: Callable[[], T]) -> T:
        """The first undisturbed result of `measure`. Leaves if there is none in `MAX_ATTEMPTS`."""
        for _ in range(MAX_ATTEMPTS):
            result, foreign = with_foreign_share(measure)
            if foreign <= MAX_FOREIGN or not self.required:
                return result
            self.discarded += 1
            sys.stderr.write(f"somebody else used {foreign:.0%} of the processors meanwhile: once more\n")
            for _ in range(MAX_WAITS):
                if idle_share(1.0) >= 1 - MAX_FOREIGN:
                    break
        raise SystemExit(
            "this machine is never quiet for long enough; --busy measures all the same, for what it is worth"
        )
