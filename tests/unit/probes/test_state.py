"""The whole product of states and events against a table written by hand, and what each state means to the faces."""

from __future__ import annotations

import pytest

from deepseek_tgi.probes.report import Admission, report_of
from deepseek_tgi.probes.state import REFUSED, Event, State, next_state

# One row a state, one letter an event in the order of EVENTS: the initial of where it leads, `.` where it is refused.
# S starting, L loading, W warming, R ready, D degraded, U unloading, Z sleeping, N unloaded (nothing), G draining
# (going), F failed, X stopped.
LETTERS = dict(zip("SLWRDUZNGFX", State, strict=True))
EVENTS = (
    *("load", "progress", "loaded", "warm", "warmed", "fall_back", "load_failed", "degrade", "recover", "swapped"),
    *("unload", "keep", "unloaded", "slept", "wake", "stop", "stopped", "fail"),
)
PRODUCT = {
    "starting": ("L", "S", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", "G", ".", "F"),
    "loading": (".", "L", "W", ".", ".", "L", "N", ".", ".", ".", ".", ".", ".", ".", ".", "G", ".", "F"),
    "warming": (".", "W", ".", "W", "R", "L", "N", ".", ".", ".", ".", ".", ".", ".", ".", "G", ".", "F"),
    "ready": ("L", ".", ".", "W", ".", ".", ".", "D", ".", "R", "U", ".", ".", ".", ".", "G", ".", "F"),
    "degraded": ("L", ".", ".", "W", ".", ".", ".", ".", "R", "D", "U", ".", ".", ".", ".", "G", ".", "F"),
    "unloading": (".", "U", ".", ".", ".", ".", ".", ".", ".", ".", ".", "R", "N", "Z", ".", "G", ".", "F"),
    "sleeping": ("L", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", "N", ".", "L", "G", ".", "F"),
    "unloaded": ("L", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", "G", ".", "F"),
    "draining": (".", "G", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", ".", "X", "F"),
    "failed": (".",) * 16 + ("X", "."),
    "stopped": (".",) * 18,
}


def test_the_table_by_hand_is_whole() -> None:
    assert set(PRODUCT) == {state.value for state in State}
    assert set(EVENTS) == {event.value for event in Event}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_every_state_and_event_is_decided(state: State, event: Event) -> None:
    letter = PRODUCT[state.value][EVENTS.index(event.value)]
    if letter == ".":
        assert next_state(state, event) is None
        assert len(REFUSED[state, event]) > 10
    else:
        assert next_state(state, event) is LETTERS[letter]
        assert (state, event) not in REFUSED


def test_only_a_warm_up_a_recovery_or_staying_makes_it_ready() -> None:
    ways = {(s, e) for s in State for e in Event if next_state(s, e) is State.READY and s is not State.READY}
    assert ways == {
        (State.WARMING, Event.WARMED),
        (State.DEGRADED, Event.RECOVER),
        (State.UNLOADING, Event.KEEP),
    }


def test_the_end_is_the_end() -> None:
    reached = {State.DRAINING}
    for _ in State:
        reached |= {t for s in reached for e in Event if (t := next_state(s, e)) is not None}
    assert reached == {State.DRAINING, State.FAILED, State.STOPPED}


# live, ready, new work before and after the first model was ready, running work goes on
FACES = {
    "starting": (True, False, "refuse", "refuse", False),
    "loading": (True, False, "refuse", "hold", True),
    "warming": (True, False, "refuse", "hold", False),
    "ready": (True, True, "admit", "admit", True),
    "degraded": (True, False, "admit", "admit", True),
    "unloading": (True, False, "refuse", "refuse", True),
    "sleeping": (True, False, "refuse", "refuse", False),
    "unloaded": (True, False, "refuse", "refuse", False),
    "draining": (True, False, "refuse", "refuse", True),
    "failed": (False, False, "refuse", "refuse", False),
    "stopped": (False, False, "refuse", "refuse", False),
}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("state", State)
def test_every_state_has_its_answers(state: State, started: bool) -> None:
    live, ready, before, after, runs = FACES[state.value]
    report = report_of(state, started)
    assert (report.live, report.ready, report.started, report.runs) == (live, ready, started, runs)
    assert report.admission is Admission(after if started else before)
    assert report.admits == (report.admission is Admission.ADMIT)
