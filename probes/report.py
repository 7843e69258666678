"""What each state means to those who ask: one table behind every face, so that no two of them can disagree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from deepseek_tgi.probes.state import State


class Admission(Enum):
    """What becomes of a new request."""

    ADMIT = "admit"
    HOLD = "hold"  # accepted, and waits for a model: up to a limit
    REFUSE = "refuse"  # 503 at once


@dataclass(frozen=True, slots=True)
class Report:
    """The answers of all faces in one state.

    live: restart it if not. ready: send traffic (gRPC: SERVING). started: the startup probe is content. runs: work that
    was taken goes on.
    """

    live: bool
    ready: bool
    started: bool
    admission: Admission
    runs: bool

    @property
    def admits(self) -> bool:
        """True if new work may begin this instant."""
        return self.admission is Admission.ADMIT


def _row(live: bool, ready: bool, admission: Admission, runs: bool) -> Report:
    return Report(live, ready, True, admission, runs)


_ADMIT, _HOLD, _REFUSE = Admission.ADMIT, Admission.HOLD, Admission.REFUSE
_STARTED: dict[State, Report] = {
    State.STARTING: _row(True, False, _REFUSE, False),
    State.LOADING: _row(True, False, _HOLD, True),
    State.WARMING: _row(True, False, _HOLD, False),
    State.READY: _row(True, True, _ADMIT, True),
    # New work is what proves recovery; who routes by readiness sends none.
    State.DEGRADED: _row(True, False, _ADMIT, True),
    State.UNLOADING: _row(True, False, _REFUSE, True),
    State.SLEEPING: _row(True, False, _REFUSE, False),
    State.UNLOADED: _row(True, False, _REFUSE, False),
    State.DRAINING: _row(True, False, _REFUSE, True),
    State.FAILED: _row(False, False, _REFUSE, False),
    State.STOPPED: _row(False, False, _REFUSE, False),
}
_NEVER_STARTED = {
    # Before the first model there is nobody whose request could be held.
    state: replace(row, started=False, admission=_REFUSE if row.admission is _HOLD else row.admission)
    for state, row in _STARTED.items()
}


def report_of(state: State, started: bool) -> Report:
    """The row of `state`; `started` once a model was ready in this process for the first time. Pure."""
    return (_STARTED if started else _NEVER_STARTED)[state]
