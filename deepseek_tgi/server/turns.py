"""One order for the calls that all ranks run.

Choice: before such a call runs, rank 0 tells the others its number, and they put off whatever else came first.
Prevents: ranks in different steps, each waiting for the other. A router has two calls under way at once (a health
Prefill beside a Decode), and nothing makes them arrive everywhere in the order they were sent. Rejected: trusting the
router; TGI's own does not see to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

from deepseek_tgi.server.engine_thread import EngineThread

R = TypeVar("R")


class _NotDueError(Exception):
    """Another call's turn has come."""


class Turns:
    """Runs numbered calls in the engine's thread, in rank 0's order. Lives on the event loop."""

    def __init__(self, thread: EngineThread, turn: Callable[[int], int], num_ranks: int) -> None:
        """`turn(number)`, run in the thread, gives the number of the call that is due: rank 0's own."""
        self._thread = thread
        self._turn = turn
        self._shared = num_ranks > 1
        self._due: int | None = None  # touched in the thread only
        self._taken = 0
        self._changed = asyncio.Event()

    async def run(self, number: int, call: Callable[[], R], what: str = "a step") -> R:
        """Result of `call`, run when its turn comes. Cancelling the caller leaves it to come and to finish."""
        if not self._shared:
            return await self._thread.run(call, what)
        return await asyncio.shield(asyncio.ensure_future(self._in_turn(number, call, what)))

    async def _in_turn(self, number: int, call: Callable[[], R], what: str) -> R:
        while True:
            seen = self._taken
            trial = asyncio.ensure_future(self._thread.run(lambda: self._if_due(number, call), what))
            await asyncio.wait({trial})
            if not isinstance(trial.exception(), _NotDueError):
                break
            while self._taken == seen:
                await self._changed.wait()
        self._taken += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return trial.result()

    def _if_due(self, number: int, call: Callable[[], R]) -> R:
        if self._due is None:
            self._due = self._turn(number)
        if self._due != number:
            raise _NotDueError
        self._due = None
        return call()


def call_number(method: str, *ids: int) -> int:
    """A number for a call, the same on every rank and in every process: 63 bits of a hash of what it names."""
    digest = blake2b(f"{method} {ids}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
