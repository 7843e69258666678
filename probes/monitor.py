"""Evidence about a process, weighed off the threads that work, and fed to its owner as events.

Whatever stands still for `motionless_s` makes the process DEGRADED: nothing should be routed to it, though it may go
on. What is stuck for `stall_limit_s`, or dead, makes it FAILED: that is not life. A bad check makes it DEGRADED, and
when nothing is left to complain about it is READY again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepseek_tgi.probes.checks import Check, RunningCheck
from deepseek_tgi.probes.finding import Watched
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State

logger = logging.getLogger(__name__)

JUDGED = frozenset({State.READY, State.DEGRADED})
"""States in which progress is owed. Loads and warm-ups take what they take; the startup probe bounds them."""


@dataclass(frozen=True, slots=True)
class MonitorLimits:
    """Seconds. `tick_s` lie between looks; one that is `late_s` late says that we were stopped ourselves."""

    stall_limit_s: float = 120.0
    motionless_s: float = 0.6
    tick_s: float = 0.1
    late_s: float = 0.5


class Monitor:
    """Owner of the complaints. `tick` is called by a thread of its own, or by a test with its own clock."""

    def __init__(
        self,
        owner: Owner,
        watched: Sequence[Watched],
        checks: Sequence[Check] = (),
        limits: MonitorLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owner = owner
        self._watched = tuple(watched)
        self._checks = {check.name: RunningCheck(check) for check in checks}
        self._limits = limits or MonitorLimits()
        self._clock = clock
        self._lock = threading.Lock()
        self._ticked_at: float | None = None
        self._against: list[str] = []
        self._stopped = threading.Event()

    def tick(self) -> None:
        """Look once. Never waits on a thread that it looks at."""
        with self._lock:
            now = self._clock()
            previous, self._ticked_at = self._ticked_at, now
            stopped = previous is None or now - previous > self._limits.tick_s + self._limits.late_s
            if stopped or self._owner.state not in JUDGED:
                self._start_afresh(now)
                return
            self._look(now)
            for check in self._checks.values():
                check.tick(now)
            self._judge()

    def complain(self, name: str, reason: str) -> None:
        """A bad result for check `name`, seen at work; takes effect at once."""
        with self._lock:
            self._checks[name].complain(reason, self._clock())
            self._judge()

    def suspect(self, name: str) -> None:
        """Something may be wrong with what check `name` asks: ask soon."""
        with self._lock:
            self._checks[name].suspect(self._clock())

    def content(self, name: str) -> None:
        """A good result for check `name`, seen at work; takes effect at once. Costs nothing while all is well."""
        if self._checks[name].reason is None:
            return
        with self._lock:
            self._checks[name].content()
            self._judge()

    def start(self) -> None:
        """Look from a thread of its own, until `stop`."""
        threading.Thread(target=self._run, name="monitor", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._limits.tick_s):
            try:
                self.tick()
            except Exception:
                logger.exception("a look at the process failed; that is no result")

    def _start_afresh(self, now: float) -> None:
        """We were stopped ourselves, or nothing is owed: what was not seen is held against nobody."""
        for each in self._watched:
            each.start_afresh(now)
        for check in self._checks.values():
            check.forget()

    def _look(self, now: float) -> None:
        findings = [each.look(now) for each in self._watched]
        self._against = [
            f"{found.where} has stood still for {found.still_s:.1f} s"
            for found in findings
            if found.still_s >= self._limits.motionless_s
        ]
        self._against += [found.complaint for found in findings if found.complaint is not None]
        for found in findings:
            if found.dead is not None:
                self._owner.apply(Event.FAIL, reason=found.dead)
            elif found.stuck_s >= self._limits.stall_limit_s:
                self._owner.apply(Event.FAIL, reason=f"{found.where} made no progress for {found.stuck_s:.0f} s")

    def _judge(self) -> None:
        reasons = self._against + [check.reason for check in self._checks.values() if check.reason is not None]
        if reasons:
            self._owner.apply(Event.DEGRADE, reason="; ".join(reasons))
        elif self._owner.state is State.DEGRADED:
            self._owner.apply(Event.RECOVER)
