"""Where the time of a step goes: its kernels by name, as torch's profiler sees them.

python -m tests.benchmarks.gpu.step_profile [--models llama lite] [--cache bfloat16] [--batches 1 16]
    [--context 1024] [--prompt 4096] [--serial]

Kernels are told apart by name, grid and shared memory. A kernel adds to a step what lies between the end of the one
before it and its own: these add up to the step. `early` is how long before that end it started (launches overlap), or,
below zero, how long after it: a gap. With `--serial` none starts early, and the step takes longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.kernels.cuda.driver import DriverPrograms
from deepseek_tgi.kernels.cuda.machine import machine_of
from tests.benchmarks.gpu.random_model import RandomBackend, write_folder
from tests.benchmarks.gpu.whole_model import (
    MAX_TOKENS,
    MODELS,
    Run,
    cache_and_inputs,
    prompt_inputs,
    write_test_tokenizer,
)

STEPS, SHOWN = 5, 14


def main(argv: Sequence[str] | None = None) -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama"])
    parser.add_argument("--cache", default="bfloat16")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--serial", action="store_true")
    args = parser.parse_args(argv)
    if args.serial:
        programs = machine_of(torch.device("cuda:0")).programs
        assert isinstance(programs, DriverPrograms)
        programs._overlaps = False
    for name in args.models:
        profiled(name, args)
        torch.cuda.empty_cache()


def profiled(name: str, args: argparse.Namespace) -> None:
    """One model."""
    with tempfile.TemporaryDirectory() as folder:
        shape = MODELS[name]
        write_folder(Path(folder), shape, write_test_tokenizer, args.layers)
        options = LoadOptions(device="cuda", kv_cache_dtype=args.cache, cuda_graphs=tuple(args.batches))
        run = Run(shape, RandomBackend.get_model(folder, options=options), torch.device("cuda:0"))
    for batch in args.batches:
        pool, inputs = cache_and_inputs(run, batch, args.context)
        run.adapter.open_pool(pool, batch, MAX_TOKENS)
        show(f"{name}, decode {batch} x {args.context}", partial(run.adapter.step, inputs, pool))
        run.adapter.close_pool()
        pool.close()
    if args.prompt:
        pool, inputs = prompt_inputs(run, args.prompt)
        show(f"{name}, prefill {args.prompt}", partial(run.adapter.step, inputs, pool))
        pool.close()
    run.adapter.close()


def show(title: str, step: Callable[[], object]) -> None:
    """Profile `step` and print its dearest kernels."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / STEPS
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        launches = launches_of(json.loads(file.read_text()))
    kinds = by_kind(launches)
    span = launches[-1].end - launches[0].start
    print(
        f"{title}: {wall * 1e6:.0f} us a step, {len(launches) / STEPS:.0f} kernels in {span / STEPS:.0f}"
        f" ({sum(max(0.0, -x.early) for x in launches[1:]) / STEPS:.0f} us of gaps)"
    )
    print("   adds us  times    each    runs   early")
    for kind, same in sorted(kinds.items(), key=lambda item: -sum(x.adds for x in item[1]))[:SHOWN]:
        adds, early, runs = ([getattr(x, field) for x in same] for field in ("adds", "early", "runs"))
        print(
            f"  {sum(adds) / STEPS:8.1f} {len(same) / STEPS:6.1f} {statistics.median(adds):7.2f}"
            f" {statistics.median(runs):7.2f} {statistics.median(early):7.2f}  {kind}"
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's run, in microseconds; see the module's docstring."""

    kind: str
    start: float
    end: float
    early: float
    adds: float

    @property
    def runs(self) -> float:
        """From its start to its end."""
        return self.end - self.start


def launches_of(trace: dict[str, Any]) -> list[Launch]:
    """What ran on the device, in the order of the starts."""
    found = []
    last: float | None = None
    rows = [row for row in trace["traceEvents"] if row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for row in sorted(rows, key=lambda row: float(row["ts"])):
        start, args = float(row["ts"]), row.get("args", {})
        end = start + float(row["dur"])
        kind = f"{row['name'][:60]} {args.get('grid', '')} x {args.get('block', '')}, {args.get('shared memory', 0)} B"
        found.append(
            Launch(kind, start, end, 0.0 if last is None else last - start, end - (start if last is None else last))
        )
        last = end if last is None else max(last, end)
    return found


def by_kind(launches: Sequence[Launch]) -> dict[str, list[Launch]]:
    """The launches of each kind."""
    kinds: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        kinds[launch.kind].append(launch)
    return kinds


if __name__ == "__main__":
    main()
