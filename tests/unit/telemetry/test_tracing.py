"""Spans reach a collector in the background; a dead collector costs nothing but the spans."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest
from otlp_collector import Collector

from deepseek_tgi.telemetry import tracing

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": ""}


@pytest.fixture
def refused() -> Iterator[str]:
    """An endpoint that refuses: bound, never listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_the_parent_is_the_callers() -> None:
    from opentelemetry.trace import get_current_span

    context = get_current_span(tracing.parent_of(PARENT)).get_span_context()
    assert f"{context.trace_id:032x}-{context.span_id:016x}" == "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


@pytest.mark.parametrize("metadata", [{}, {"traceparent": "nonsense"}, {"traceparent": "ff-0-0-0"}])
def test_a_bad_or_absent_parent_is_none(metadata: dict[str, str]) -> None:
    from opentelemetry.trace import get_current_span

    assert not get_current_span(tracing.parent_of(metadata)).get_span_context().is_valid


def test_without_an_endpoint_nothing_is_needed() -> None:
    traces = tracing.set_up(None, "service", lambda _count: pytest.fail("nothing can be dropped"))
    with traces.tracer.start_as_current_span("call"):
        pass
    traces.shutdown()


@pytest.mark.parametrize("where", ["refused", "http://192.0.2.1:4317", "http://no-such-host.invalid:4317"])
def test_a_dead_collector_stalls_neither_calls_nor_the_end(where: str, refused: str) -> None:
    started = time.monotonic()
    traces = tracing.set_up(refused if where == "refused" else where, "service", lambda _count: None)
    assert time.monotonic() - started < 2.0
    started = time.monotonic()
    for _ in range(5000):  # more than the queue holds
        with traces.tracer.start_as_current_span("call"):
            pass
    assert time.monotonic() - started < 3.0
    started = time.monotonic()
    traces.shutdown()
    assert time.monotonic() - started < tracing.STOP_TIMEOUT_S + 1.0


def test_losses_are_counted_and_told_once(refused: str, caplog: pytest.LogCaptureFixture) -> None:
    lost: list[int] = []
    traces = tracing.set_up(refused, "service", lost.append)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with traces.tracer.start_as_current_span("call"):
                pass
        traces.shutdown()
        deadline = time.monotonic() + 20
        while not lost and time.monotonic() < deadline:
            time.sleep(0.05)
    assert sum(lost) == 3
    assert len([r for r in caplog.records if f"spans lost, {refused}" in r.getMessage()]) == 1


def test_a_missing_extra_turns_traces_off_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    traces = tracing.set_up("http://127.0.0.1:1", "service", lambda _count: None)
    traces.shutdown()
    assert "deepseek-tgi[otlp]" in caplog.text


def test_spans_arrive_with_their_parent() -> None:
    collector = Collector.start()
    traces = tracing.set_up(collector.url, "service", lambda _count: None)
    with traces.tracer.start_as_current_span("call", context=tracing.parent_of(PARENT)):
        pass
    traces.shutdown()
    try:
        span = collector.wait_for(lambda span: span.name == "call")
    finally:
        collector.stop()
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
