"""One mixture-of-experts layer of DeepSeek-V2-Lite on the CPU: only the chosen experts, beside all experts run densely.

    python -m tests.benchmarks.moe_cpu [--tokens 1 4 16 64 256] [--group 64] [--threads 2] [--json FILE]

Both sides have the same INT4 weights, the same kernels and the same routing, in one process and by turns: `grouped` is
the one call a layer that serves, `dense` runs each of the 64 experts on all tokens and weighs results, most by zero.
Every call takes other tokens, so few rows go round more experts than a cache holds. Results are compared before
anything is timed. Figures are milliseconds a layer; bytes are those of the chosen experts' weights, each counted once.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.moe import Expert, Packed, PackedExperts
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from tests.benchmarks.measure import Samples, circumstances, read_bandwidth_bytes_per_s
from tests.benchmarks.quiet import Quiet

HIDDEN, INNER, SHARED = 2048, 1408, 2 * 1408
ROUTING = Routing(64, 6, Scoring.SOFTMAX, GroupRank.NONE, 1, 1, normalise=False, scale=1.0)
TOKENS = (1, 4, 16, 64, 256)
SAMPLE_S = 0.2
BATCHES = 32
SIDES = ("grouped", "dense")
AGREEMENT = 1e-5
"""Of the largest output: one side adds in another order."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts, held once for both sides."""

    kernels: KernelSet
    experts: PackedExperts

    def bytes_touched(self, ids: torch.Tensor) -> int:
        """Bytes of the weights of the different experts in `ids`, and of the shared one."""
        assert self.experts.shared is not None
        chosen = [self.experts.experts[expert] for expert in set(ids.flatten().tolist())]
        return sum(expert.nbytes for expert in (*chosen, self.experts.shared))


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one call with their experts: `x [T, H]`, `ids [T, k]`, `weights [T, k]`, and what the call adds to."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


def make_layer(kernels: KernelSet, group: int) -> Layer:
    """64 experts and two shared ones of random INT4 weights, some 300 MB."""
    generator = torch.Generator().manual_seed(0)

    def weight(n: int, k: int) -> Packed:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
        zeros = torch.randint(6, 10, (n, k // group), dtype=torch.uint8, generator=generator)
        scales = (torch.rand(n, k // group, generator=generator) + 0.5) * (0.2 / k**0.5)
        return kernels.pack_int4(codes, zeros, scales.half(), group)

    def expert(inner: int) -> Expert:
        return Expert(weight(2 * inner, HIDDEN), weight(HIDDEN, inner))

    return Layer(kernels, kernels.pack_experts([expert(INNER) for _ in range(ROUTING.num_experts)], expert(SHARED)))


def make_batches(kernels: KernelSet, tokens: int) -> list[Batch]:
    """Different tokens, routed by the layer's own rule from random logits."""
    batches = []
    for seed in range(max(2, BATCHES // tokens)):
        generator = torch.Generator().manual_seed(seed)
        ids, weights = kernels.route(torch.randn(tokens, ROUTING.num_experts, generator=generator), None, ROUTING)
        x = torch.randn(tokens, HIDDEN, generator=generator)
        batches.append(Batch(x, ids, weights, torch.zeros(tokens, HIDDEN)))
    return batches


def grouped_side(layer: Layer, tokens: int) -> Callable[[Batch], None]:
    """As the model runs it: one call, scratch at hand."""
    scratch = torch.empty(layer.experts.scratch_floats(tokens, ROUTING.top_k))

    def run(batch: Batch) -> None:
        layer.kernels.moe(batch.x, batch.ids, batch.weights, layer.experts, batch.out, scratch=scratch)

    return run


def dense_side(layer: Layer, tokens: int) -> Callable[[Batch], None]:
    """Every expert on every token, weighed by a mask; buffers at hand too."""
    kernels, shared = layer.kernels, layer.experts.shared
    assert shared is not None
    gate_up, own = torch.empty(tokens, 2 * INNER), torch.empty(tokens, HIDDEN)
    shared_gate_up, mask = torch.empty(tokens, 2 * SHARED), torch.empty(tokens, ROUTING.num_experts)

    def through(expert: Expert, x: torch.Tensor, wide: torch.Tensor, out: torch.Tensor) -> None:
        kernels.int4_linear(x, expert.gate_up, None, None, wide)  # type: ignore[arg-type]
        kernels.silu_int4_linear(wide, expert.down, None, None, out)  # type: ignore[arg-type]

    def run(batch: Batch) -> None:
        mask.zero_().scatter_(1, batch.ids.long(), batch.weights)
        for index, expert in enumerate(layer.experts.experts):
            through(expert, batch.x, gate_up, own)
            batch.out.addcmul_(own, mask[:, index : index + 1])
        through(shared, batch.x, shared_gate_up, own)
        batch.out.add_(own)

    return run


def check(sides: dict[str, Callable[[Batch], None]], batch: Batch) -> None:
    """Refuse to time what is wrong."""
    results = {}
    for name, run in sides.items():
        batch.out.zero_()
        run(batch)
        results[name] = batch.out.clone()
    error = float((results["grouped"] - results["dense"]).abs().max() / results["dense"].abs().max())
    if not error <= AGREEMENT:
        raise SystemExit(f"grouped and dense differ by {error:.1e}, expected at most {AGREEMENT:.0e}: not timed")


def sample(run: Callable[[Batch], None], batches: Sequence[Batch], calls: int) -> float:
    """Milliseconds a call over `calls` calls, going round the batches."""
    started = time.perf_counter()
    for call in range(calls):
        run(batches[call % len(batches)])
    return (time.perf_counter() - started) / calls * 1e3


def measure_tokens(layer: Layer, tokens: int, repeats: int, quiet: Quiet) -> dict[str, Any]:
    """Both sides by turns at one number of tokens."""
    batches = make_batches(layer.kernels, tokens)
    sides = {"grouped": grouped_side(layer, tokens), "dense": dense_side(layer, tokens)}
    check(sides, batches[0])
    # Whole rounds of the batches, so that bytes and time are of the same calls.
    rounds = {
        name: max(1, round(SAMPLE_S * 1e3 / sample(run, batches, len(batches)) / len(batches)))
        for name, run in sides.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            calls = rounds[name] * len(batches)
            taken[name].append(quiet.run(lambda run=run, calls=calls: sample(run, batches, calls)))  # type: ignore[misc]
    touched = {"grouped": statistics.mean(layer.bytes_touched(b.ids) for b in batches), "dense": layer.experts.nbytes}
    figures: dict[str, Any] = {"tokens": tokens}
    for name in sides:
        samples = Samples(tuple(taken[name]))
        rate = touched[name] / samples.median * 1e3
        figures[name] = {"ms": samples.to_json(), "bytes_touched": touched[name], "bytes_per_s": rate}
    figures["dense_over_grouped"] = figures["dense"]["ms"]["median"] / figures["grouped"]["ms"]["median"]
    return figures


def measure(
    tokens: Sequence[int] = TOKENS, group: int = 64, threads: int = 0, repeats: int = 7, quiet: Quiet | None = None
) -> dict[str, Any]:
    """All figures of a run as JSON's types; what `print_report` takes. Other benchmarks call this too."""
    quiet = quiet or Quiet(required=True)
    bandwidth = quiet.run(read_bandwidth_bytes_per_s)
    kernels = select_kernels("cpu", ComputeDtype.BFLOAT16, "native", threads)
    layer = make_layer(kernels, group)
    return {
        "layer": f"H {HIDDEN}, {ROUTING.num_experts} experts of {INNER}, top {ROUTING.top_k}, shared {SHARED}, "
        f"INT4 in groups of {group}, {kernels.compute_dtype.value}",
        "kernel_threads": kernels.num_threads,
        "weight_bytes": layer.experts.nbytes,
        "read_bytes_per_s": bandwidth,
        "figures": [measure_tokens(layer, count, repeats, quiet) for count in tokens],
        "discarded_as_disturbed": quiet.discarded,
    }


def print_report(report: dict[str, Any]) -> None:
    """What `measure` found, a line for each side and number of tokens."""
    print(f"{report['layer']}; {report['kernel_threads']} threads; weights {report['weight_bytes'] / 1e6:.0f} MB")
    print(f"memory reads {report['read_bytes_per_s'] / 1e9:.1f} GB/s")
    for figures in report["figures"]:
        print(f"\n{figures['tokens']} tokens: dense takes {figures['dense_over_grouped']:.1f} times as long")
        for side in SIDES:
            ms, touched, rate = (figures[side][key] for key in ("ms", "bytes_touched", "bytes_per_s"))
            share = rate / report["read_bytes_per_s"]
            print(
                f"  {side:<8} {ms['median']:9.2f} ms ({ms['min']:.2f}-{ms['max']:.2f}), "
                f"{touched / 1e6:6.1f} MB touched, {rate / 1e9:5.1f} GB/s, {share:4.0%} of the memory's"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--group", type=int, default=64, help="quantisation group: 64 or 128")
    parser.add_argument("--threads", type=int, default=0, help="0: all this process may use")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="measure although the machine is busy with something else")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    options = parser.parse_args(words)
    facts = circumstances() | {"command": shlex.join(["python", "-m", "tests.benchmarks.moe_cpu", *words])}
    quiet = Quiet(required=not options.busy)
    report = facts | measure(options.tokens, options.group, options.threads, options.repeats, quiet)
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
