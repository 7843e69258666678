"""The states of a serving process as data: a closed table of moves, and the one object that makes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum

from deepseek_tgi.errors import NotReadyError

logger = logging.getLogger(__name__)


class State(Enum):
    """Where the process is; the value is the name in logs and metrics."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.LOADING, State.DRAINING, State.FAILED}),
    State.LOADING: frozenset({State.WARMING, State.DRAINING, State.FAILED}),
    State.WARMING: frozenset({State.READY, State.DRAINING, State.FAILED}),
    # A router that connects anew warms up again; nothing else runs meanwhile.
    State.READY: frozenset({State.WARMING, State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset({State.FAILED, State.STOPPED}),
    State.FAILED: frozenset({State.STOPPED}),
    State.STOPPED: frozenset(),
}
"""Allowed moves; STOPPED is terminal, FAILED is reached from anywhere but STOPPED."""


def may_move(current: State, target: State) -> bool:
    """True if `current` -> `target` is in the table; pure."""
    return target in TRANSITIONS[current]


class StateOwner:
    """Holds the state of one process; `move` is the only way to change it, and tells `on_change` of changes only.

    `state` is a plain attribute read: the hot path takes no lock.
    """

    def __init__(self, on_change: Callable[[State], None] | None = None) -> None:
        self.state = State.STARTING
        self._on_change = on_change
        self._lock = threading.Lock()

    def move(self, target: State) -> bool:
        """Go to `target` if the table allows it; false (and a log line) if not, nothing if already there."""
        with self._lock:
            if target is self.state:
                return True
            if not may_move(self.state, target):
                logger.warning("state %s does not lead to %s: ignored", self.state.value, target.value)
                return False
            logger.info("state %s -> %s", self.state.value, target.value)
            self.state = target
        if self._on_change is not None:
            self._on_change(target)
        return True

    def require(self, *allowed: State) -> None:
        """Raise `NotReadyError` unless the state is one of `allowed`."""
        if self.state not in allowed:
            names = " or ".join(state.value for state in allowed)
            raise NotReadyError(f"the shard is {self.state.value}; this call needs it to be {names}")
