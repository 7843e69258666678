"""The one object that moves a state, and the journal of its moves.

Choice: a published snapshot is one frozen value in one attribute. Prevents: a flag and a state that disagree between
two stores, and a lock on the path of every request. Rejected: a flag beside the state, kept equal by care.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.probes.report import Report, report_of
from deepseek_tgi.probes.state import REFUSED, Event, State, next_state

logger = logging.getLogger(__name__)

KEPT_INCREMENTS = 256


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known beside the state. A fact that is None is left as it was."""

    stage: str | None = None
    percent: float | None = None
    model: str | None = None
    generation: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at one moment. `since` is the owner's clock when the state was entered, `seq` counts what led here."""

    state: State
    seq: int
    since: float
    started: bool = False
    facts: Facts = field(default_factory=Facts)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "report", report_of(self.state, self.started))


@dataclass(frozen=True, slots=True)
class Increment:
    """One event that was taken: `before` -> `after.state`. Sequence numbers have no gaps."""

    at: float
    event: Event
    before: State
    after: Snapshot

    @property
    def seq(self) -> int:
        """Its place in the order."""
        return self.after.seq


@dataclass(frozen=True, slots=True)
class CatchUp:
    """What a subscriber missed: a snapshot where the journal does not reach back far enough, then what followed it."""

    snapshot: Snapshot | None
    increments: tuple[Increment, ...]


class Owner:
    """Owner of one state. Any thread may `apply`; `current` is read without a lock and never waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, kept: int = KEPT_INCREMENTS) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._journal: deque[Increment] = deque(maxlen=kept)
        self._subscribers: list[Subscription] = []
        self.current = Snapshot(State.STARTING, 0, clock())

    @property
    def state(self) -> State:
        """The state right now."""
        return self.current.state

    @property
    def admits(self) -> bool:
        """True if new work may begin: the flag of the hot path."""
        return self.current.report.admits

    def apply(
        self,
        event: Event,
        *,
        stage: str | None = None,
        percent: float | None = None,
        model: str | None = None,
        generation: int | None = None,
        reason: str | None = None,
    ) -> bool:
        """Take an event; false, and nothing changes, where the table refuses it. Subscribers are woken afterwards."""
        given = Facts(stage, percent, model, generation, reason)
        with self._lock:
            before = self.current
            target = next_state(before.state, event)
            if target is None:
                why = REFUSED[before.state, event]
                logger.debug("state %s: event %s is refused: %s", before.state.value, event.value, why)
                return False
            at = self._clock()
            after = _after(before, event, target, given, at)
            self._journal.append(Increment(at, event, before.state, after))
            self.current = after
            subscribers = tuple(self._subscribers)
        if after.state is not before.state:
            what = f" ({reason})" if reason else ""
            level = logging.WARNING if after.state in {State.DEGRADED, State.FAILED} else logging.INFO
            logger.log(level, "state %s -> %s%s", before.state.value, after.state.value, what)
        for subscriber in subscribers:
            subscriber.wake()
        return True

    def require(self, *allowed: State) -> None:
        """Raise `NotReadyError` unless the state is one of `allowed`."""
        snapshot = self.current
        if snapshot.state not in allowed:
            raise refusal(snapshot, " or ".join(state.value for state in allowed))

    def require_admission(self) -> None:
        """Raise `NotReadyError` unless new work may begin."""
        snapshot = self.current
        if not snapshot.report.admits:
            raise refusal(snapshot, "ready")

    def require_running(self) -> None:
        """Raise `NotReadyError` unless work that was taken goes on."""
        snapshot = self.current
        if not snapshot.report.runs:
            raise refusal(snapshot, "ready")

    def history(self) -> tuple[Increment, ...]:
        """What is kept of the past, oldest first."""
        with self._lock:
            return tuple(self._journal)

    def subscribe(self, wake: Callable[[], None], from_seq: int | None = None) -> Subscription:
        """Follow the changes after `from_seq` (None: from a snapshot of now). Close it when done.

        `wake` is called after each change, on the thread that made it: it must return at once and then `take`.
        """
        subscription = Subscription(self, wake, from_seq)
        with self._lock:
            self._subscribers.append(subscription)
        return subscription

    def _since(self, seq: int | None) -> CatchUp:
        with self._lock:
            kept = tuple(self._journal)
            current = self.current
        oldest = kept[0].seq if kept else current.seq + 1
        if seq is None or not oldest - 1 <= seq <= current.seq:
            return CatchUp(current, ())
        return CatchUp(None, tuple(increment for increment in kept if increment.seq > seq))

    def _leave(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription in self._subscribers:
                self._subscribers.remove(subscription)


class Subscription:
    """A place in an owner's order; for one reader. `take` never waits."""

    def __init__(self, owner: Owner, wake: Callable[[], None], seq: int | None) -> None:
        self._owner = owner
        self._seq = seq
        self.wake = wake

    def take(self) -> CatchUp:
        """What came since the last call, in order and without gaps; a snapshot first where increments are gone."""
        missed = self._owner._since(self._seq)
        if missed.increments:
            self._seq = missed.increments[-1].seq
        elif missed.snapshot is not None:
            self._seq = missed.snapshot.seq
        return missed

    def close(self) -> None:
        """Be woken no more."""
        self._owner._leave(self)


def refusal(snapshot: Snapshot, needed: str) -> NotReadyError:
    """The error for a call that the state does not admit."""
    reason = f": {snapshot.facts.reason}" if snapshot.facts.reason else ""
    return NotReadyError(f"the shard is {snapshot.state.value}{reason}; this call needs it to be {needed}")


def _after(before: Snapshot, event: Event, target: State, given: Facts, at: float) -> Snapshot:
    facts = before.facts
    moved = target is not before.state or event is Event.FALL_BACK
    if moved:
        facts = replace(facts, stage=None, percent=None, reason=None)
    if target is State.UNLOADED and moved:
        facts = replace(facts, model=None, generation=None)
    known = {name: value for name in Facts.__slots__ if (value := getattr(given, name)) is not None}
    return Snapshot(
        state=target,
        seq=before.seq + 1,
        since=at if moved else before.since,
        started=before.started or target is State.READY,
        facts=replace(facts, **known) if known else facts,
    )
