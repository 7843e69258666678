"""What can be asked of a thread that works: each check is started and looked at later, never waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from deepseek_tgi.probes.threshold import Threshold

Start = Callable[[], "Future[None] | None"]
"""Begins the check and returns what will tell; None if it cannot run now. An exception means a bad result."""


@dataclass(frozen=True, slots=True)
class Check:
    """A question asked every `period_s`; an answer later than `deadline_s` is none.

    Bad after `failures` bad answers in a row. `only_when_bad` asks only to prove recovery.
    """

    name: str
    start: Start
    period_s: float
    deadline_s: float
    failures: int = 1
    only_when_bad: bool = False


class RunningCheck:
    """One check over time; owned by the monitor's thread. `reason` says why it is bad, None while it is not."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.reason: str | None = None
        self._threshold = Threshold(check.failures)
        self._suspected = False
        self._next_at = 0.0
        self._asked_at = 0.0
        self._answer: Future[None] | None = None

    def tick(self, now: float) -> None:
        """Look at an answer, or ask anew. Never waits."""
        if self._answer is not None:
            self._look(now)
            return
        unasked = self.check.only_when_bad and self._threshold.good and not self._suspected
        if now < self._next_at or unasked:
            return
        self._suspected = False
        self._next_at = now + self.check.period_s
        self._asked_at = now
        self._answer = self.check.start()

    def complain(self, reason: str, now: float) -> None:
        """A bad result that somebody else saw; what is under way now was asked before it and tells nothing.

        Recovery is asked for a period later: who asks less often than that should not miss that something was wrong.
        """
        self._answer = None
        self._next_at = now + self.check.period_s
        self._note(False, reason)

    def suspect(self, now: float) -> None:
        """Something may be wrong: ask in a period, also where only recovery is asked for."""
        self._suspected = True
        self._next_at = now + self.check.period_s

    def content(self) -> None:
        """A good result that somebody else saw."""
        self._note(True, None)

    def forget(self) -> None:
        """No result: what was asked is not waited for any more."""
        self._answer = None

    def _look(self, now: float) -> None:
        answer = self._answer
        assert answer is not None
        if not answer.done():
            if now - self._asked_at > self.check.deadline_s:
                self._answer = None
            return
        self._answer = None
        if answer.cancelled():
            return
        error = answer.exception()
        self._note(error is None, None if error is None else f"{self.check.name}: {error or type(error).__name__}")

    def _note(self, good: bool, reason: str | None) -> None:
        self._threshold.note(good)
        if self._threshold.good:
            self.reason = None
        elif reason is not None:
            self.reason = reason
