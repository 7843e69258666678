"""What a working thread shows of itself: stamps that cost nothing to make, and its own CPU clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stamp:
    """The last sign of progress: how many there were, when it came, and what the thread is in (empty: nothing)."""

    count: int
    at: float
    call: str


class Progress:
    """Written by one thread, read by any, without a lock: each stamp is one new value in one attribute.

    Only the thread's own work stamps: neither requests that arrive nor probes that ask.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cpu_clock: int | None = None
        self.last = Stamp(0, clock(), "")

    def begin(self, call: str) -> None:
        """A call starts."""
        if self._cpu_clock is None:
            self.adopt()
        self.last = Stamp(self.last.count + 1, self._clock(), call)

    def adopt(self) -> None:
        """The calling thread is the one that stamps."""
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())

    def step(self) -> None:
        """The call got somewhere: a layer, a slice."""
        last = self.last
        self.last = Stamp(last.count + 1, self._clock(), last.call)

    def end(self) -> None:
        """The call is over."""
        self.last = Stamp(self.last.count + 1, self._clock(), "")

    def cpu_seconds(self) -> float | None:
        """What the thread has computed so far; None where it has not begun or cannot be asked."""
        if self._cpu_clock is None:
            return None
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:
            return None
