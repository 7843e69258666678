"""Every metric of the shard, with unit and labels, in one table; counters of one process.

Choice: one registry a process, given to whoever counts. Prevents: series of two servers in one test process adding
up, and names made up at the place of counting. Rejected: prometheus_client's global registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DURATION_BUCKETS = tuple(0.00015 * 1.5**i for i in range(35))
"""Seconds; TGI's own edges for every name that ends in `duration`."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its Prometheus name, kind (`counter`, `gauge` or `histogram`), help with unit, and label names."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


SHARD_METRICS = (
    MetricSpec("deepseek_tgi_rpc_duration", "histogram", "Seconds of one gRPC call, waiting included", ("method",)),
    MetricSpec("deepseek_tgi_rpc_failure", "counter", "gRPC calls that failed, by status code", ("method", "code")),
    MetricSpec("deepseek_tgi_forward_duration", "histogram", "Seconds in the model in one step", ("method",)),
    MetricSpec("deepseek_tgi_generated_tokens", "counter", "Tokens sent to the router"),
    MetricSpec("deepseek_tgi_cached_requests", "gauge", "Requests in the batch returned last"),
    MetricSpec("deepseek_tgi_engine_events", "counter", "What the engine counts, by event", ("event",)),
    MetricSpec("deepseek_tgi_spans_dropped", "counter", "Spans that could not be exported"),
    MetricSpec("deepseek_tgi_state", "gauge", "1 for the state the process is in, 0 for the others", ("state",)),
    MetricSpec("deepseek_tgi_state_transitions", "counter", "Changes of state, by both ends", ("before", "after")),
)


class ShardMetrics:
    """The shard's metrics; owns its registry. Thread-safe, as prometheus_client's values are."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry: CollectorRegistry = CollectorRegistry()
        specs = {spec.name.removeprefix("deepseek_tgi_"): spec for spec in SHARD_METRICS}

        def counter(key: str) -> Counter:
            return Counter(specs[key].name, specs[key].help, specs[key].labels, registry=self.registry)

        def gauge(key: str) -> Gauge:
            return Gauge(specs[key].name, specs[key].help, specs[key].labels, registry=self.registry)

        def histogram(key: str) -> Histogram:
            spec = specs[key]
            return Histogram(spec.name, spec.help, spec.labels, buckets=DURATION_BUCKETS, registry=self.registry)

        self.rpc_duration = histogram("rpc_duration")
        self.rpc_failure = counter("rpc_failure")
        self.forward_duration = histogram("forward_duration")
        self.generated_tokens = counter("generated_tokens")
        self.cached_requests = gauge("cached_requests")
        self.engine_events = counter("engine_events")
        self.spans_dropped = counter("spans_dropped")
        self.state = gauge("state")
        self.state_transitions = counter("state_transitions")

    def count_event(self, event: str, times: int) -> None:
        """One of the engine's own counters."""
        self.engine_events.labels(event).inc(times)

    def serve(self, port: int) -> None:
        """Answer `GET /metrics` on `port`, all addresses, from a thread of its own. Raises `OSError` if taken."""
        from prometheus_client import start_http_server

        start_http_server(port, registry=self.registry)
