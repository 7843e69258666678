"""OpenTelemetry in the door: a span for each HTTP request, one for each call to the shards, and links between them.

Without an endpoint there is no tracer, and then nothing is created and calls carry no trace metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepseek_tgi.telemetry.tracing import parent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

Metadata = tuple[tuple[str, str], ...]


class Spans:
    """Makes spans with `tracer`; does nothing without one."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer = tracer

    @contextmanager
    def request(self, path: str, traceparent: str | None, tracestate: str | None) -> Iterator[None]:
        """The time during which one HTTP request is answered; its parent is the client's span if it names one."""
        if self.tracer is None:
            yield
            return
        from opentelemetry.trace import SpanKind

        carrier = {"traceparent": traceparent or "", "tracestate": tracestate or ""}
        with self.tracer.start_as_current_span(path, context=parent_of(carrier), kind=SpanKind.SERVER):
            yield

    def current(self) -> SpanContext | None:
        """What a batch's span will be linked to."""
        if self.tracer is None:
            return None
        from opentelemetry.trace import get_current_span

        return get_current_span().get_span_context()

    def call(self, name: str, linked: Iterable[SpanContext | None] = ()) -> tuple[Span | None, Metadata | None]:
        """A span of one call to the shards, without a parent, and the metadata that carries it. The caller ends it."""
        if self.tracer is None:
            return None, None
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        links = [Link(context) for context in linked if context is not None and context.is_valid]
        span = self.tracer.start_span(name, context=Context(), kind=SpanKind.CLIENT, links=links)
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
        return span, tuple(carrier.items())
