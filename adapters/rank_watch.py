"""Notices that another rank's process has ended while this one's GPU waits for it.

The host asks a GPU for results in a call that comes back when they are there, and a recorded step tells nobody what it
waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from weakref import WeakMethod

from deepseek_tgi.adapters.rank_processes import Process

WATCH_S = 0.1


class RankWatch:
    """Owner of a thread that calls `ended(ranks)` once, when processes of some ranks have ended.

    `ended` is a method of an object which the thread does not keep: it ends with it.
    """

    def __init__(self, processes: Sequence[Process], own_rank: int, ended: Callable[[Sequence[int]], None]) -> None:
        self._others = [(rank, process) for rank, process in enumerate(processes) if rank != own_rank]
        self._ended = WeakMethod(ended)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; from any thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(WATCH_S):
            gone = [rank for rank, process in self._others if not process.runs()]
            ended = self._ended() if gone else None
            if ended is not None:
                ended(gone)
            if gone or self._ended() is None:
                return
