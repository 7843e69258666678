"""The event loop as a thread that owes signs: it answers no-ops between its callbacks."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from deepseek_tgi.probes.progress import Progress
from deepseek_tgi.probes.thread_watch import ThreadWatch


class LoopPulse:
    """Stamps of the running event loop; made on it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.progress = Progress()
        self.progress.adopt()

    def send_noop(self) -> Future[None]:
        """Answered as soon as the loop comes to it; from any thread."""
        answer: Future[None] = Future()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stamp, answer)
        return answer

    def _stamp(self, answer: Future[None]) -> None:
        self.progress.step()
        answer.set_result(None)


def watch_loop() -> ThreadWatch:
    """A watch of the running event loop."""
    pulse = LoopPulse()
    return ThreadWatch("main", pulse.progress, pulse.send_noop)
