"""What is told of each change to those who do not ask: once, in order, from whatever thread it came."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import deepseek_tgi.probes
from deepseek_tgi.probes.owner import Increment, Owner, Snapshot
from deepseek_tgi.probes.publishing import Follower, trace_change
from deepseek_tgi.probes.state import Event


async def test_a_follower_tells_changes_on_the_loop_whichever_thread_makes_them() -> None:
    owner = Owner()
    owner.apply(Event.LOAD)
    shown: list[Snapshot] = []
    told: list[tuple[int, Increment]] = []
    follower = Follower(owner, shown.append, lambda increment: told.append((threading.get_ident(), increment)))
    assert [snapshot.seq for snapshot in shown] == [1]

    def elsewhere() -> None:
        for event in (Event.LOADED, Event.WARMED, Event.DEGRADE, Event.RECOVER):
            owner.apply(event)

    await asyncio.to_thread(elsewhere)
    while len(told) < 4:
        await asyncio.sleep(0)
    owner.apply(Event.STOP)
    follower.close()
    owner.apply(Event.STOPPED)
    await asyncio.sleep(0)
    assert [increment.seq for _, increment in told] == [2, 3, 4, 5, 6], "what came before the close is told, no more"
    assert {thread for thread, _ in told} == {threading.get_ident()}


async def test_a_change_made_on_the_loop_is_told_before_it_returns_and_in_order() -> None:
    owner = Owner()
    told: list[int] = []

    def tell(increment: Increment) -> None:
        if increment.event is Event.WARMED:
            owner.apply(Event.STOP)  # a change that a change brings about
        told.append(increment.seq)

    follower = Follower(owner, lambda _: None, tell)
    for count, event in enumerate((Event.LOAD, Event.LOADED, Event.WARMED), 1):
        owner.apply(event)
        assert told[:count] == list(range(1, count + 1))
    assert told == [1, 2, 3, 4]
    follower.close()


def test_a_change_is_an_event_of_a_trace() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    owner = Owner()
    owner.apply(Event.LOAD, model="m", generation=3)
    owner.apply(Event.FAIL, reason="the disk is full")
    trace_change(provider.get_tracer("test"), owner.history()[-1])
    (span,) = exporter.get_finished_spans()
    (event,) = span.events
    assert (span.name, event.name) == ("state", "deepseek_tgi.state.changed")
    assert dict(event.attributes or {}) == {
        "deepseek_tgi.state.event": "fail",
        "deepseek_tgi.state.before": "loading",
        "deepseek_tgi.state.after": "failed",
        "deepseek_tgi.state.seq": 2,
        "deepseek_tgi.model": "m",
        "deepseek_tgi.generation": 3,
        "deepseek_tgi.reason": "the disk is full",
    }


def test_no_evidence_is_taken_from_a_clock_that_can_be_set() -> None:
    sources = list(Path(deepseek_tgi.probes.__path__[0]).glob("*.py"))
    assert len(sources) > 10
    setting = ("time.time(", "time_ns(", "datetime", "CLOCK_REALTIME")
    assert [(path.name, word) for path in sources for word in setting if word in path.read_text()] == []
