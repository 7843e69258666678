"""Whether one thread works, from its own signs: stamps, its CPU clock, and no-ops that it answers while idle.

It *stands still* if it shows neither a stamp nor computing, although it is in a call or was sent a no-op to answer. It
is *stuck* if it stamps nothing, computing or not. How much waits for it, how long requests take and how often probes
ask are no evidence of anything.

Choice: signs of the thread's own, among them its CPU clock. Prevents: restarting a server in the middle of a long
prompt, and probes kept green by their own traffic. Rejected: timing requests; asking the thread and waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from deepseek_tgi.probes.finding import Finding
from deepseek_tgi.probes.progress import Progress

HEARTBEAT_S = 0.4
"""An idle thread gets its next no-op this long after it answered the last."""
MOTION_CPU_S = 0.001
"""Computing less than this is standing still: a thread that only polls is not at work."""


class ThreadWatch:
    """Watches one thread; used by one other."""

    def __init__(self, name: str, progress: Progress, send_noop: Callable[[], Future[None]]) -> None:
        self._name = name
        self._progress = progress
        self._send_noop = send_noop
        self._seen = progress.last
        self._cpu: float | None = None
        self._moved_at = self._stamped_at = 0.0
        self._noop: Future[None] | None = None
        self._noop_due = 0.0

    def start_afresh(self, now: float) -> None:
        """Hold nothing from before `now` against the thread."""
        self._seen, self._cpu = self._progress.last, self._progress.cpu_seconds()
        self._moved_at = self._stamped_at = self._noop_due = now
        self._noop = None

    def look(self, now: float) -> Finding:
        """What can be said now; sends a no-op where one is due. Never waits."""
        last, cpu = self._progress.last, self._progress.cpu_seconds()
        if last.count != self._seen.count:
            self._moved_at = self._stamped_at = now
        elif self._computed(cpu):
            self._moved_at = now
        if self._moved_at == now:
            self._cpu = cpu
        self._seen = last
        self._ask_for_life(now)
        where = f"the {self._name} thread" + (f", in {last.call}," if last.call else "")
        return Finding(now - self._moved_at, now - self._stamped_at, where)

    def _computed(self, cpu: float | None) -> bool:
        """Of a clock that never could be read nothing is known, and nothing is said; a dead thread's no longer can."""
        if cpu is None:
            return self._cpu is None
        return self._cpu is None or cpu - self._cpu >= MOTION_CPU_S

    def _ask_for_life(self, now: float) -> None:
        if self._noop is not None and self._noop.done():
            self._noop = None
            self._noop_due = now + HEARTBEAT_S
        if self._noop is None and not self._seen.call:
            # Idle and nothing asked of it: no sign is owed.
            self._moved_at = self._stamped_at = now
            if now >= self._noop_due:
                self._noop = self._send_noop()
