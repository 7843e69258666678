"""The one thread that touches the engine, so that the event loop stays free during a forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


class EngineThread:
    """Runs calls one after another, in the order they were given; a caller that goes away does not stop its call.

    The engine thus needs no lock, and a health Prefill may come between any two calls.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._pending = 0

    @property
    def idle(self) -> bool:
        """True if no call runs or waits; read on the event loop."""
        return self._pending == 0

    async def run(self, call: Callable[[], R]) -> R:
        """Result of `call`, run in the thread. Cancelling the caller leaves the call to finish."""
        loop = asyncio.get_running_loop()
        self._pending += 1
        future: Future[R] = self._executor.submit(call)
        future.add_done_callback(lambda _: _tell(loop, self._done))
        return await asyncio.shield(asyncio.wrap_future(future))

    def _done(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Take no more calls; does not wait for a running one."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
