"""Where the time of a step goes: its kernels by name, as torch's profiler sees them.

python -m tests.benchmarks.gpu.step_profile [--models llama lite] [--cache bfloat16] [--batches 1 16]
    [--context 1024] [--prompt 4096] [--serial]

A kernel that starts while the one before it ends is counted from its start, so the sum may exceed the step; with
`--serial` none does, and the step takes longer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events) / STEPS
    count = sum(event.count for event in events) / STEPS
    print(f"{title}: {wall * 1e6:.0f} us a step, of which {total:.0f} in {count:.0f} kernels")
    for event in events[:SHOWN]:
        print(f"  {event.device_time_total / STEPS:9.1f} us {event.count / STEPS:6.1f} x  {event.key[:84]}")


if __name__ == "__main__":
    main()
