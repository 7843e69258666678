"""The router's `/metrics`: every name, type and bucket in one table, and the few lines that write the text format.

Choice: own counters and exposition instead of prometheus-client's. That library appends `_total` to every counter's
name, and TGI's names, which dashboards use, do not have it; it also takes a lock per sample, on the token path.
A series appears when it is first recorded, as with TGI's exporter.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; charset=utf-8"
DURATION_BUCKETS = tuple(0.00015 * 1.5**i for i in range(35))
BATCH_SIZE_BUCKETS = tuple(float(2**i) for i in range(11))
QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
SUMMARY_WINDOW = 4096
"""Samples a summary's quantiles are taken over."""

COUNTERS = {
    "tgi_request_count": "Generations asked for; OpenAI and Vertex calls count once more",
    "tgi_request_success": "Generations that ended well",
    "tgi_request_failure": "Generations that failed, by reason",
    "tgi_batch_concat": "Times new requests joined a running batch, by reason",
    "tgi_batch_inference_count": "Steps asked of the shard",
    "tgi_batch_inference_success": "Steps the shard answered",
    "tgi_batch_inference_failure": "Steps the shard failed",
    "deepseek_tgi_request_cancelled": "Generations given up because their client was gone",
    "deepseek_tgi_state_transitions": "Changes of state, by both ends",
    "deepseek_tgi_prompt_tokens": "Prompt tokens of admitted requests",
    "deepseek_tgi_prompt_tokens_reused": "Prompt tokens found in the prefix cache",
}
GAUGES = {
    "tgi_queue_size": "Requests waiting for admission",
    "tgi_batch_current_size": "Requests in the running batch",
    "tgi_batch_current_max_tokens": "Tokens the running batch may grow to",
    "deepseek_tgi_requests_in_flight": "Permits taken",
    "deepseek_tgi_state": "1 for the state the server is in, 0 for the others",
    "deepseek_tgi_kv_blocks_free": "KV blocks that a new request could get",
    "deepseek_tgi_kv_blocks_total": "KV blocks there are, without the reserved one",
}
HISTOGRAMS = {
    "tgi_request_duration": "Seconds from arrival to the last token",
    "tgi_request_validation_duration": "Seconds spent validating",
    "tgi_request_queue_duration": "Seconds spent queued",
    "tgi_request_inference_duration": "Seconds from admission to the last token",
    "tgi_request_mean_time_per_token_duration": "Seconds per token, mean of a request",
    "tgi_request_input_length": "Prompt tokens of a request",
    "tgi_request_generated_tokens": "Tokens generated for a request",
    "tgi_request_max_new_tokens": "Tokens a request asked for",
    "tgi_batch_next_size": "Requests admitted together",
    "tgi_batch_concat_duration": "Seconds the shard spent joining batches",
    "tgi_batch_inference_duration": "Seconds of a step, as seen here",
    "tgi_batch_forward_duration": "Seconds of a step's forward",
    "tgi_batch_decode_duration": "Seconds of a step's sampling and text",
    "tgi_batch_filter_duration": "Seconds of a filter call",
}
SUMMARIES = {"tgi_request_skipped_tokens": "Tokens accepted in a step, minus one"}


@dataclass(slots=True)
class Histogram:
    """Counts per bucket, their sum; `edges` ascending, values above the last go to `+Inf`."""

    edges: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.edges) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value


@dataclass(slots=True)
class Summary:
    """Count and sum of all values, and the latest ones for quantiles."""

    recent: list[float] = field(default_factory=list)
    count: int = 0
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        if len(self.recent) < SUMMARY_WINDOW:
            self.recent.append(value)
        else:
            self.recent[self.count % SUMMARY_WINDOW] = value
        self.count += 1
        self.total += value


class RouterMetrics:
    """Owner of all series. Called from the event loop only."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int) -> None:
        self._counters: dict[tuple[str, str], float] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}
        self._summaries: dict[str, Summary] = {}
        self._edges = {
            "tgi_request_input_length": _hundredths(max_input_tokens),
            "tgi_request_generated_tokens": _hundredths(max_total_tokens),
            "tgi_request_max_new_tokens": _hundredths(max_total_tokens),
            "tgi_batch_next_size": BATCH_SIZE_BUCKETS,
        }

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Raise a counter; `label` is written as in the text format, e.g. `err="dropped"`."""
        key = (name, label)
        self._counters[key] = self._counters.get(key, 0) + amount

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge."""
        self._gauges[name, label] = value

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Put a value (seconds or tokens) into a histogram or a summary."""
        if name in SUMMARIES:
            self._summaries.setdefault(name, Summary()).observe(value)
            return
        found = self._histograms.get((name, label))
        if found is None:
            found = self._histograms[name, label] = Histogram(self._edges.get(name, DURATION_BUCKETS))
        found.observe(value)

    def value(self, name: str, label: str = "") -> float:
        """A counter's or gauge's present value, 0 if never recorded."""
        return self._gauges.get((name, label), self._counters.get((name, label), 0))

    def render(self) -> str:
        """The Prometheus text format, families in the order of the tables above."""
        lines: list[str] = []
        for name, help_text in COUNTERS.items():
            rows = [f"{name}{_braces(label)} {_number(v)}" for (n, label), v in self._counters.items() if n == name]
            _family(lines, name, help_text, "counter", rows)
        for name, help_text in GAUGES.items():
            rows = [f"{name}{_braces(label)} {_number(v)}" for (n, label), v in self._gauges.items() if n == name]
            _family(lines, name, help_text, "gauge", rows)
        for name, help_text in HISTOGRAMS.items():
            found = [(label, h) for (n, label), h in self._histograms.items() if n == name]
            _family(lines, name, help_text, "histogram", [r for label, h in found for r in _rows(name, label, h)])
        for name, help_text in SUMMARIES.items():
            rows = _quantile_rows(name, self._summaries[name]) if name in self._summaries else []
            _family(lines, name, help_text, "summary", rows)
        return "\n".join(lines) + "\n"


def _hundredths(limit: int) -> tuple[float, ...]:
    return tuple(limit / 100 * i for i in range(1, 101))


def _family(lines: list[str], name: str, help_text: str, kind: str, rows: list[str]) -> None:
    if rows:
        lines.extend([f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *rows, ""])


def _rows(name: str, label: str, histogram: Histogram) -> list[str]:
    rows = []
    running = 0
    comma = f"{label}," if label else ""
    for edge, amount in zip((*histogram.edges, math.inf), histogram.counts, strict=True):
        running += amount
        rows.append(f'{name}_bucket{{{comma}le="{_number(edge)}"}} {running}')
    rows.append(f"{name}_sum{_braces(label)} {_number(histogram.total)}")
    rows.append(f"{name}_count{_braces(label)} {running}")
    return rows


def _quantile_rows(name: str, summary: Summary) -> list[str]:
    ordered = sorted(summary.recent)
    rows = []
    for quantile in QUANTILES:
        value = ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
        rows.append(f'{name}{{quantile="{_number(quantile)}"}} {_number(value)}')
    return [*rows, f"{name}_sum {_number(summary.total)}", f"{name}_count {summary.count}"]


def _braces(label: str) -> str:
    return f"{{{label}}}" if label else ""


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
