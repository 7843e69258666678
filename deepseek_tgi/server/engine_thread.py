"""The one thread that touches the engine, so that the event loop stays free during a forward."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from deepseek_tgi.probes.progress import Progress

log = logging.getLogger(__name__)

R = TypeVar("R")

IDLE_S = 0.05
"""A pause in the calls that is longer than the one between two steps of a busy server."""


class EngineThread:
    """Runs calls one after another, in the order they were given; a caller that goes away does not stop its call.

    The engine thus needs no lock, and a health Prefill may come between any two calls. `progress` is stamped by the
    thread alone, when a call starts and ends and whenever the engine gets somewhere within one.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._pending = 0
        self._spare: Callable[[], bool] | None = None
        self._spare_timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """True if no call runs or waits; read on the event loop."""
        return self._pending == 0

    async def run(self, call: Callable[[], R], what: str = "a call") -> R:
        """Result of `call`, run in the thread. Cancelling the caller leaves the call to finish; `what` names it."""
        loop = asyncio.get_running_loop()
        self._pending += 1
        future = self.submit(call, what)
        future.add_done_callback(lambda _: _tell(loop, self._done))
        return await asyncio.shield(asyncio.wrap_future(future))

    def while_idle(self, work: Callable[[], bool], idle_s: float = IDLE_S) -> None:
        """Do `work` in the thread, a piece at a time as long as it returns true, when no call came for `idle_s`.

        Takes the place of earlier work. A piece that raises is the last one, and is logged. On the event loop.
        """
        self._spare = work
        loop = asyncio.get_running_loop()

        def look() -> None:
            if self._spare is not work:
                return
            if self._pending:
                self._spare_timer = loop.call_later(idle_s, look)
                return
            self.submit(work, "preparing").add_done_callback(lambda piece: _tell(loop, lambda: done(piece)))

        def done(piece: Future[bool]) -> None:
            if piece.cancelled():
                return
            if piece.exception() is not None:
                log.error("preparing for larger batches failed; it is given up", exc_info=piece.exception())
            elif piece.result():
                self._spare_timer = loop.call_later(idle_s if self._pending else 0, look)

        self._spare_timer = loop.call_later(idle_s, look)

    def submit(self, call: Callable[[], R], what: str) -> Future[R]:
        """`call`, on its way to the thread; from any thread."""
        return self._executor.submit(self._stamped, call, what)

    def send_noop(self) -> Future[None]:
        """Something that an idle thread answers at once; from any thread."""
        return self.submit(_nothing, "")

    def _stamped(self, call: Callable[[], R], what: str) -> R:
        self.progress.begin(what)
        try:
            return call()
        finally:
            self.progress.end()

    def _done(self) -> None:
        self._pending -= 1

    def close(self) -> None:
        """Take no more calls; does not wait for a running one."""
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        self._spare = None
        self._executor.shutdown(wait=False, cancel_futures=True)


def _nothing() -> None:
    return


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
