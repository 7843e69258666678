"""Where the time of a decode step goes: its kernels by name, as torch's profiler sees a replayed step.

python -m tests.benchmarks.gpu.step_profile [--model llama] [--cache bfloat16] [--batch 1] [--context 1024]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from deepseek_tgi.adapters.base import LoadOptions
from tests.benchmarks.gpu.random_model import RandomBackend, write_folder
from tests.benchmarks.gpu.whole_model import MAX_TOKENS, MODELS, Run, cache_and_inputs, write_test_tokenizer

STEPS, SHOWN = 5, 24


def main(argv: Sequence[str] | None = None) -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--cache", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        shape = MODELS[args.model]
        write_folder(Path(folder), shape, write_test_tokenizer, args.layers)
        options = LoadOptions(device="cuda", kv_cache_dtype=args.cache, cuda_graphs=(args.batch,))
        run = Run(shape, RandomBackend.get_model(folder, options=options), torch.device("cuda:0"))
    pool, inputs = cache_and_inputs(run, args.batch, args.context)
    run.adapter.open_pool(pool, args.batch, MAX_TOKENS)
    run.adapter.step(inputs, pool)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            run.adapter.step(inputs, pool)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events) / STEPS
    count = sum(event.count for event in events) / STEPS
    print(f"{shape.name}, batch {args.batch}, context {args.context}: {total:.0f} us in {count:.0f} kernels a step")
    for event in events[:SHOWN]:
        print(f"  {event.device_time_total / STEPS:8.1f} us {event.count / STEPS:6.1f} x  {event.key[:90]}")


if __name__ == "__main__":
    main()
