"""From an owner's journal to those who cannot ask: metrics and traces get every change, once and in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from deepseek_tgi.probes.owner import Increment, Owner, Snapshot

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

OnSnapshot = Callable[[Snapshot], None]
OnIncrement = Callable[[Increment], None]


class Follower:
    """Carries the changes of `owner` to the event loop's thread; made there, closed there.

    `on_snapshot` gets the present state, at once and wherever increments were lost; `on_increment` each change. What
    the loop's own thread changes is told before `apply` returns: nobody gets an answer, and then metrics from before.
    """

    def __init__(self, owner: Owner, on_snapshot: OnSnapshot, on_increment: OnIncrement) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_snapshot = on_snapshot
        self._on_increment = on_increment
        self._closed = False
        self._carrying = False
        self._thread = threading.get_ident()
        self._subscription = owner.subscribe(self._wake)
        self._carry()

    def close(self) -> None:
        """Carry what is left, and then no more."""
        self._carry()
        self._closed = True
        self._subscription.close()

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._carry()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._carry)

    def _carry(self) -> None:
        if self._closed or self._carrying:
            return  # whoever carries takes again until nothing is left
        self._carrying = True
        try:
            while (missed := self._subscription.take()).snapshot is not None or missed.increments:
                if missed.snapshot is not None:
                    self._on_snapshot(missed.snapshot)
                for increment in missed.increments:
                    self._on_increment(increment)
        finally:
            self._carrying = False


def trace_change(tracer: Tracer, increment: Increment) -> None:
    """A span without length that carries one change of state as an OpenTelemetry event."""
    after = increment.after
    facts = {name: getattr(after.facts, name) for name in ("model", "generation", "stage", "reason")}
    attributes = {
        "deepseek_tgi.state.event": increment.event.value,
        "deepseek_tgi.state.before": increment.before.value,
        "deepseek_tgi.state.after": after.state.value,
        "deepseek_tgi.state.seq": after.seq,
        **{f"deepseek_tgi.{name}": value for name, value in facts.items() if value is not None},
    }
    with tracer.start_as_current_span("state") as span:
        span.add_event("deepseek_tgi.state.changed", attributes)
