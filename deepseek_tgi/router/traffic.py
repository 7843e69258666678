"""How many requests are being answered, and whether new ones are still taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Traffic:
    """Owner of the count. `draining` is set once, at the start of the end, and never taken back."""

    def __init__(self) -> None:
        self.draining = False
        self.active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """The time during which one request is answered."""
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def idle_within(self, seconds: float | None) -> bool:
        """Wait until nothing is being answered; false if that takes longer. None waits however long it takes."""
        if not self.active:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            return False
        return True
