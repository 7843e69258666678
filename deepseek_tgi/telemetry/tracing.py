"""OpenTelemetry spans of a process: exported in the background, bounded, and never in a request's way.

Without an endpoint, or without the `otlp` extra, the API's own no-op tracer is used and nothing can fail.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

QUEUE_SPANS = 2048
EXPORT_TIMEOUT_S = 5
STOP_TIMEOUT_S = 2.0
WARN_EVERY_S = 60.0


class Tracing:
    """A process's tracer and the end of its exporter. `shutdown` returns within `STOP_TIMEOUT_S` whatever happens."""

    def __init__(self, tracer: Tracer, stop: Callable[[], object] | None = None) -> None:
        self.tracer = tracer
        self._stop = stop

    def shutdown(self) -> None:
        """Flush what can be flushed in time; a dead collector does not hold the process."""
        if self._stop is None:
            return
        thread = threading.Thread(target=self._stop, daemon=True)
        thread.start()
        thread.join(STOP_TIMEOUT_S)


def parent_of(metadata: Mapping[str, str]) -> Context:
    """The W3C parent named by `traceparent` and `tracestate` of `metadata`; a root context without one."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(dict(metadata))


def set_up(endpoint: str | None, service_name: str, on_drop: Callable[[int], None]) -> Tracing:
    """A tracer that exports to the OTLP `endpoint` over gRPC; `on_drop(n)` is told of spans that were lost."""
    from opentelemetry import trace

    if not endpoint:
        return Tracing(trace.NoOpTracer())
    try:
        provider = _provider(endpoint, service_name, on_drop)
    except ImportError as error:
        logger.warning(
            "--otlp-endpoint is given but traces are off: %s; install deepseek-tgi[otlp] to export them", error
        )
        return Tracing(trace.NoOpTracer())
    return Tracing(provider.get_tracer("deepseek_tgi"), provider.shutdown)


def _provider(endpoint: str, service_name: str, on_drop: Callable[[int], None]) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Counted(SpanExporter):
        """The OTLP exporter, with its losses counted and told once a minute."""

        def __init__(self) -> None:
            self._inner = OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=EXPORT_TIMEOUT_S)
            self._next_warning = 0.0

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            result = self._inner.export(spans)
            if result is not SpanExportResult.SUCCESS:
                on_drop(len(spans))
                if time.monotonic() >= self._next_warning:
                    self._next_warning = time.monotonic() + WARN_EVERY_S
                    logger.warning("traces: %d spans lost, %s does not take them", len(spans), endpoint)
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return self._inner.force_flush(timeout_millis)

    # The exporter's own log says the same for each try; ours says it once a minute.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    resource = Resource.create({"service.name": service_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Counted(), max_queue_size=QUEUE_SPANS, export_timeout_millis=5000))
    return provider
