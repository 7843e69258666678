"""The states of a process (or of one model in it) as data: every pair of state and event is decided here, and pure.

One machine serves both: a process has an owner whose state the probes tell, and each model that is loaded beside it may
have one of its own. So a load *beside* a serving model moves the new model's machine and leaves the process READY; a
load *in place* moves the process itself, and nothing is ready while it lasts.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where the process is; the value is the name in logs, metrics and answers."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"
    UNLOADING = "unloading"
    SLEEPING = "sleeping"
    UNLOADED = "unloaded"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class Event(Enum):
    """What happened; the value is the name in logs and metrics."""

    LOAD = "load"  # weights begin to load, in place of whatever served
    PROGRESS = "progress"  # a stage or a percentage of what goes on
    LOADED = "loaded"  # the weights are there
    WARM = "warm"  # a warm-up begins
    WARMED = "warmed"  # the largest step ran: work may come
    FALL_BACK = "fall_back"  # the load failed; the model before it is loaded again
    LOAD_FAILED = "load_failed"  # the load failed and nothing serves; another may be loaded
    DEGRADE = "degrade"  # evidence says that work fails or stands still
    RECOVER = "recover"  # evidence says that it works again
    SWAPPED = "swapped"  # from now on new work goes to another model
    UNLOAD = "unload"  # the model is to go, or to sleep, when what runs is done
    KEEP = "keep"  # it stays after all
    UNLOADED = "unloaded"  # its memory is free
    SLEPT = "slept"  # its weights wait in host memory
    WAKE = "wake"  # they come back
    STOP = "stop"  # the process was asked to leave
    STOPPED = "stopped"  # it has nothing left to do
    FAIL = "fail"  # it cannot go on, whatever it was doing


_S, _E = State, Event
_ALIVE = (
    _S.STARTING, _S.LOADING, _S.WARMING, _S.READY, _S.DEGRADED, _S.UNLOADING, _S.SLEEPING, _S.UNLOADED,
)  # fmt: skip
"""Neither leaving nor gone."""

TRANSITIONS: dict[tuple[State, Event], State] = {
    **{(s, _E.LOAD): _S.LOADING for s in (_S.STARTING, _S.UNLOADED, _S.READY, _S.DEGRADED, _S.SLEEPING)},
    **{(s, _E.PROGRESS): s for s in (_S.STARTING, _S.LOADING, _S.WARMING, _S.UNLOADING, _S.DRAINING)},
    (_S.LOADING, _E.LOADED): _S.WARMING,
    # A router that connects anew warms up again; nothing else runs meanwhile.
    **{(s, _E.WARM): _S.WARMING for s in (_S.WARMING, _S.READY, _S.DEGRADED)},
    (_S.WARMING, _E.WARMED): _S.READY,
    **{(s, _E.FALL_BACK): _S.LOADING for s in (_S.LOADING, _S.WARMING)},
    **{(s, _E.LOAD_FAILED): _S.UNLOADED for s in (_S.LOADING, _S.WARMING)},
    (_S.READY, _E.DEGRADE): _S.DEGRADED,
    (_S.DEGRADED, _E.RECOVER): _S.READY,
    **{(s, _E.SWAPPED): s for s in (_S.READY, _S.DEGRADED)},
    **{(s, _E.UNLOAD): _S.UNLOADING for s in (_S.READY, _S.DEGRADED)},
    (_S.UNLOADING, _E.KEEP): _S.READY,
    **{(s, _E.UNLOADED): _S.UNLOADED for s in (_S.UNLOADING, _S.SLEEPING)},
    (_S.UNLOADING, _E.SLEPT): _S.SLEEPING,
    (_S.SLEEPING, _E.WAKE): _S.LOADING,
    **{(s, _E.STOP): _S.DRAINING for s in _ALIVE},
    **{(s, _E.STOPPED): _S.STOPPED for s in (_S.DRAINING, _S.FAILED)},
    **{(s, _E.FAIL): _S.FAILED for s in (*_ALIVE, _S.DRAINING)},
}
"""Where each event leads from each state in which it means something."""

_NOTHING_SERVES = "no work is taken here, so there is none whose success or failure could tell anything"
_REASONS: dict[Event, str] = {
    _E.LOAD: "a model loads or leaves already; one at a time",
    _E.PROGRESS: "nothing goes on here that has stages",
    _E.LOADED: "no load is under way",
    _E.WARM: "there is no model to warm up",
    _E.WARMED: "no warm-up is under way",
    _E.FALL_BACK: "no load is under way that could have failed",
    _E.LOAD_FAILED: "no load is under way that could have failed",
    _E.DEGRADE: _NOTHING_SERVES,
    _E.RECOVER: _NOTHING_SERVES,
    _E.SWAPPED: "no model serves that another could follow",
    _E.UNLOAD: "no model serves that could be taken away",
    _E.KEEP: "no model is being taken away",
    _E.UNLOADED: "no model is being taken away",
    _E.SLEPT: "no model is being put to sleep",
    _E.WAKE: "nothing sleeps",
    _E.STOP: "it leaves already",
    _E.STOPPED: "it has not been asked to leave, and has not failed",
    _E.FAIL: "it has failed already",
}
_LEAVING = "the process is leaving and takes up nothing new"
_OVER = "the process has stopped, and nothing happens to it any more"
_SPECIAL: dict[tuple[State, Event], str] = {
    (_S.DEGRADED, _E.DEGRADE): "it is degraded already",
    (_S.READY, _E.RECOVER): "it is well already",
    (_S.UNLOADED, _E.UNLOADED): "nothing is loaded already",
    (_S.STARTING, _E.WARM): "the model has not been loaded yet",
    (_S.LOADING, _E.WARM): "the model has not been loaded yet",
    (_S.DRAINING, _E.STOP): "it leaves already",
    (_S.FAILED, _E.STOP): "it has failed and leaves anyhow",
    (_S.FAILED, _E.FAIL): "it has failed already",
}


def _reason(state: State, event: Event) -> str:
    if state is State.STOPPED:
        return _OVER
    if (special := _SPECIAL.get((state, event))) is not None:
        return special
    return _LEAVING if state in {State.DRAINING, State.FAILED} else _REASONS[event]


REFUSED: dict[tuple[State, Event], str] = {
    (state, event): _reason(state, event) for state in State for event in Event if (state, event) not in TRANSITIONS
}
"""Why each other pair changes nothing."""


def next_state(state: State, event: Event) -> State | None:
    """Where `event` leads from `state`; None if it changes nothing there, for the reason in `REFUSED`. Pure."""
    return TRANSITIONS.get((state, event))
