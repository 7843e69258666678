"""The figures of a run, what they are judged by, and how they are printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.measure import Samples

OURS = "deepseek-tgi"
SHORT, LONG, PREFILL = "decode, short context", "decode, context 512", "prefill 512"
BATCHED, HTTP = "16 sequences, no server", "16 streams, HTTP"
TARGETS = {SHORT: 1.0, LONG: 1.0, PREFILL: 1.0, HTTP: 1.5}
"""Least ratio of our median to the best peer's."""


@dataclass
class Figures:
    """Every sample of the run in tokens a second: metric, then side."""

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, metric: str, side: str, rate: float) -> None:
        self.rates.setdefault(metric, {}).setdefault(side, []).append(rate)

    def samples(self, metric: str) -> dict[str, Samples]:
        return {side: Samples(tuple(values)) for side, values in self.rates.get(metric, {}).items()}

    def ratio(self, metric: str) -> float:
        """Our median over the best other median."""
        samples = self.samples(metric)
        return samples[OURS].median / max(s.median for side, s in samples.items() if side != OURS)

    def to_json(self) -> dict[str, Any]:
        return {
            metric: {
                "sides": {side: samples.to_json() for side, samples in self.samples(metric).items()},
                "ratio": self.ratio(metric),
                "target": TARGETS.get(metric),
                "met": self.ratio(metric) >= TARGETS[metric] if metric in TARGETS else None,
            }
            for metric in self.rates
        }


def print_report(figures: Figures, report: dict[str, Any]) -> None:
    """`report` is what `cpu_serving.main` collects around the figures."""
    print(f"\n{report['cpu']}, {report['threads']} threads, commit {report['commit']}, {report['date']}")
    print(f"model {report['model']} against {report['gguf']}")
    print(f"{report['discarded_as_disturbed']} measurements were disturbed by other programs and done again")
    for metric in figures.rates:
        print(f"\n{metric} (tokens/s, median and range of {report['repeats']})")
        for side, samples in figures.samples(metric).items():
            print(f"  {side:<24} {samples}")
        verdict = ""
        if metric in TARGETS:
            met = figures.ratio(metric) >= TARGETS[metric]
            verdict = f", target {TARGETS[metric]:.1f}: {'met' if met else 'MISSED'}"
        print(f"  {'ratio to the best peer':<24} {figures.ratio(metric):8.2f}{verdict}")
    if HTTP in figures.rates:
        served = figures.samples(HTTP)[OURS].median
        best = max(samples.median for side, samples in figures.samples(BATCHED).items() if side != OURS)
        print(f"  {'to its batch, unserved':<24} {served / best:8.2f}")
    for side, waits in report["first_text_s"].items():
        print(f"  {side:<24} first text after {waits['median']:.2f} s ({waits['min']:.2f}-{waits['max']:.2f})")
    _print_floor(figures, report["floor"])
    _print_memory(report["peak_memory_bytes"])


def _print_floor(figures: Figures, floor: dict[str, Any]) -> None:
    print(f"\nmemory reads {floor['read_bytes_per_s'] / 1e9:.1f} GB/s; a batch-1 token reads every weight once:")
    for side, ceiling in floor["ceiling_tokens_per_s"].items():
        reached = figures.samples(SHORT)[side].median / ceiling
        print(f"  {side:<24} {ceiling:8.1f} tokens/s at most, {reached:.0%} reached")


def _print_memory(peaks: dict[str, Any]) -> None:
    print("\npeak memory, MB")
    for side, peak in peaks["worker"].items():
        print(f"  {side:<24} {peak / 1e6:8.0f}")
    for side, processes in peaks["http"].items():
        parts = ", ".join(f"{role} {peak / 1e6:.0f}" for role, peak in processes.items())
        print(f"  {side + ', served':<24} {sum(processes.values()) / 1e6:8.0f}  ({parts})")
