"""Whole models of random numbers in real shapes on one GPU: decode and prefill, bare and through a shard's RPCs.

    python -m tests.benchmarks.gpu.whole_model [--models llama qwen lite] [--cache bfloat16 int8 int4] [--json FILE]

A bare step is `ModelAdapter.step`: inputs on the host, logits on the device. `device` is its time by the GPU's own
clock over many steps launched one behind the other, `wall` that of steps whose tokens are chosen and read back, as
serving must, and `ahead` the same where each step is launched, with tokens that only the device knows, before those of
the one before it are read: how an engine takes them while no request ends.
Tokens a second are wall figures. Floors are bytes over the read bandwidth measured first. Weights are random, pages
hold what the model stores of a random prompt.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter
from deepseek_tgi.adapters.prompt_graphs import SIZES
from deepseek_tgi.core import ForwardInputs, SamplingParams
from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.kv.layout import CacheLayout
from deepseek_tgi.kv.pool import KVPool
from deepseek_tgi.logits.pipeline import Choosing, SamplingPlan, identity, sampling_state
from deepseek_tgi.logits.watermark import Watermark
from tests.benchmarks.gpu.floors import TARGETS_TOKENS_PER_S, step_bytes
from tests.benchmarks.gpu.random_model import LLAMA_8B, QWEN_7B, V2_LITE, RandomBackend, Shape, write_folder
from tests.benchmarks.measure import circumstances

MODELS = {"llama": LLAMA_8B, "qwen": QWEN_7B, "lite": V2_LITE}
BATCHES, CONTEXTS, PROMPTS = (1, 16, 32), (1024, 8192, 32768), (512, 4096, 32768)
MAX_TOKENS = 33024
STEPS, REPEATS, SAMPLE_S = 20, 5, 0.1
FILL_TOKENS = 1024
_LEFT_FREE_BYTES = 6 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """One loaded model and where it computes."""

    shape: Shape
    adapter: ModelAdapter
    device: torch.device

    def fits(self, num_tokens: int) -> bool:
        """True if a cache of so many tokens does."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 30
        return num_tokens * self.adapter.kv_layout.bytes_per_token < free - _LEFT_FREE_BYTES or num_tokens < 4096


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print; with `--json`, save as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cache", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS)
    parser.add_argument("--layers", type=int, default=0, help="cut models short")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--rpc", action="store_true", help="through a shard's RPCs as well")
    parser.add_argument("--json", type=Path, dest="out")
    args = parser.parse_args(argv)
    results: dict[str, Any] = {"circumstances": circumstances(), "models": {}}
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    results["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    bandwidth = read_bandwidth(device)
    results["read_bandwidth_bytes_per_s"] = bandwidth
    print(f"{results['device']}: reads {bandwidth * 1e-12:.2f} TB/s")
    for name in args.models:
        for cache in args.cache:
            rows = list(measured(MODELS[name], cache, bandwidth, args))
            results["models"].setdefault(MODELS[name].name, {})[cache] = rows
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))


def measured(shape: Shape, cache: str, bandwidth: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every row of one model with one cache format."""
    from tests.benchmarks.gpu.rpc import through_rpcs

    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), shape, write_test_tokenizer, args.layers)
        started = time.perf_counter()
        options = LoadOptions(device=args.device, kernels=args.kernels, kv_cache_dtype=cache, cuda_graphs=_graphs(args))
        adapter = RandomBackend.get_model(folder, options=options)
        run = Run(shape, adapter, torch.device(adapter.info.device))
        loaded = time.perf_counter() - started
        print(f"\n{shape.name}, {cache} cache, {adapter.info.attention_impl}: drawn and packed in {loaded:.1f} s")
        yield {"what": "load", "seconds": loaded, "weight_bytes": adapter.info.weight_bytes}
        decoded: dict[tuple[int, int], float] = {}
        for batch in args.batches:
            for context in args.contexts:
                if run.fits(batch * (context + 64)):
                    row = attempted("decode", partial(decode_row, run, batch, context, bandwidth))
                    if "ahead_s" in row:
                        decoded[batch, context] = row["ahead_s"]
                    yield row
        for tokens in args.prompts:
            yield attempted("prefill", partial(prefill_row, run, tokens))
        adapter.close()
        del adapter, run
        _forget()
        if args.rpc:
            yield from through_rpcs(Path(folder), cache, args, decoded)


def attempted(what: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row, or one that says why there is none."""
    try:
        return measure()
    except (DeepseekTgiError, RuntimeError) as error:
        print(f"  {what} FAILED: {type(error).__name__}: {str(error).splitlines()[0]}")
        return {"what": what, "error": f"{type(error).__name__}: {error}"}


def decode_row(run: Run, batch: int, context: int, bandwidth: float) -> dict[str, Any]:
    """One decode step of `batch` requests with `context` tokens each, the new one included."""
    pool, inputs = cache_and_inputs(run, batch, context)
    run.adapter.open_pool(pool, batch, MAX_TOKENS)
    finite = bool(run.adapter.step(inputs, pool).isfinite().all())

    greedy = SamplingPlan([sampling_state(SamplingParams(), [0])] * batch, Watermark(), identity)

    def begun(logits: torch.Tensor) -> Choosing:
        return greedy.begin(logits, run.adapter.best_of(logits))

    def read_back() -> list[int]:
        return begun(run.adapter.step(inputs, pool)).result().ids

    def launch_and_read(waiting: list[torch.Tensor]) -> list[int]:
        choosing = begun(waiting.pop())
        following = run.adapter.step_with(inputs, choosing.ids, pool)
        waiting.append(run.adapter.step(inputs, pool) if following is None else following)
        return choosing.result().ids

    first = _wall_seconds(read_back, 2)
    steps, repeats = max(2, min(STEPS, int(SAMPLE_S / first))), REPEATS if first < SAMPLE_S else 1
    device = [_device_seconds(run, lambda: run.adapter.step(inputs, pool), steps) for _ in range(repeats)]
    wall = [_wall_seconds(read_back, steps) for _ in range(repeats)]
    waiting = [run.adapter.step(inputs, pool)]
    ahead = statistics.median(_wall_seconds(partial(launch_and_read, waiting), steps) for _ in range(repeats))
    run.adapter.close_pool()
    pool.close()
    _forget()
    floor = step_bytes(run.shape, batch, context, run.adapter.kv_layout.bytes_per_token).seconds(bandwidth)
    middle = statistics.median(wall)
    target = TARGETS_TOKENS_PER_S.get((run.shape.name, batch, context))
    row: dict[str, Any] = {
        "what": "decode", "batch": batch, "context": context, "finite": finite, "device_s": statistics.median(device),
        "wall_s": middle, "wall_spread_s": [min(wall), max(wall)], "ahead_s": ahead,
        "tokens_per_s": batch / middle, "ahead_tokens_per_s": batch / ahead, "floor_s": floor,
        "target_tokens_per_s": target,
    }  # fmt: skip
    verdict = "" if target is None else f"  target {target:.0f}: {'met' if batch / middle >= target else 'missed'}"
    print(
        f"  decode {batch:3d} x {context:5d}: device {row['device_s'] * 1e3:7.3f} ms, wall {middle * 1e3:7.3f} ms "
        f"({min(wall) * 1e3:.3f}-{max(wall) * 1e3:.3f}), {batch / middle:8.0f} tok/s, "
        f"ahead {batch / ahead:8.0f}, floor {floor * 1e3:6.3f} ms "
        f"(x{middle / floor:.2f}){verdict}{'' if finite else '  LOGITS NOT FINITE'}"
    )
    return row


def prefill_row(run: Run, tokens: int) -> dict[str, Any]:
    """A prompt of `tokens` in one step, nothing cached before it."""
    pool, inputs = prompt_inputs(run, tokens)
    record(run, pool, tokens)

    def read_back() -> object:
        return run.adapter.step(inputs, pool).argmax(-1).tolist()

    read_back()  # to its end: what is still under way would count as the first repeat's
    wall = [_wall_seconds(read_back, 1) for _ in range(REPEATS if tokens <= 4096 else 3)]
    middle = statistics.median(wall)
    run.adapter.close_pool()
    pool.close()
    _forget()
    print(
        f"  prefill {tokens:6d}: {middle * 1e3:8.1f} ms ({min(wall) * 1e3:.1f}-{max(wall) * 1e3:.1f}), "
        f"{tokens / middle:8.0f} tok/s"
    )
    return {
        "what": "prefill", "tokens": tokens, "wall_s": middle, "wall_spread_s": [min(wall), max(wall)],
        "tokens_per_s": tokens / middle,
    }  # fmt: skip


def record(run: Run, pool: KVPool, tokens: int) -> None:
    """All that a shard records while it idles, where a prompt of `tokens` is of a size that it records."""
    if tokens <= SIZES[-1]:
        run.adapter.open_pool(pool, 1, MAX_TOKENS)
        while run.adapter.go_on_preparing():
            pass


def prompt_inputs(run: Run, tokens: int) -> tuple[KVPool, ForwardInputs]:
    """A pool, and the step that stores a prompt of `tokens` in it."""
    layout = run.adapter.kv_layout
    blocks = -(-tokens // layout.block_size)
    pool = KVPool(layout, 1 + blocks, run.device)
    return pool, _prompt_of(torch.randint(0, 1000, (tokens,)), torch.randperm(blocks, dtype=torch.int32) + 1, layout)


def _prompt_of(ids: torch.Tensor, table: torch.Tensor, layout: CacheLayout) -> ForwardInputs:
    tokens, size = len(ids), layout.block_size
    positions = torch.arange(tokens, dtype=torch.int32)
    return ForwardInputs(
        input_ids=ids,
        positions=positions,
        slots=table.long()[positions // size] * size + positions % size,
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        block_tables=table[None],
        cache_lens=torch.zeros(1, dtype=torch.int32),
        logit_rows=torch.tensor([tokens - 1]),
        max_seqlen=tokens,
        max_context=tokens,
    )


def _fill(run: Run, pool: KVPool) -> None:
    """Every block with what the model stores of a prompt, over and over.

    Bytes drawn at random have a mean that attention adds to all tokens alike, whose routers then choose alike.
    """
    layout = run.adapter.kv_layout
    count = min(pool.num_blocks - 1, -(-FILL_TOKENS // layout.block_size))
    table = torch.arange(1, count + 1, dtype=torch.int32)
    run.adapter.step(_prompt_of(torch.randint(0, 1000, (count * layout.block_size,)), table, layout), pool)
    for start in range(1 + count, pool.num_blocks, count):
        rest = pool.storage[start : start + count]
        rest.copy_(pool.storage[1 : 1 + len(rest)])


def cache_and_inputs(run: Run, batch: int, context: int) -> tuple[KVPool, ForwardInputs]:
    """A pool of stored tokens, its blocks dealt out in no order, and the step that adds the last token to each."""
    layout = run.adapter.kv_layout
    blocks = -(-context // layout.block_size)
    pool = KVPool(layout, 1 + batch * blocks, run.device)
    _fill(run, pool)
    tables = (torch.randperm(batch * blocks, dtype=torch.int32) + 1).view(batch, blocks)
    last = context - 1
    lens = torch.full((batch,), last, dtype=torch.int32)
    inputs = ForwardInputs(
        input_ids=torch.randint(0, 1000, (batch,)),
        positions=lens,
        slots=tables[:, last // layout.block_size].long() * layout.block_size + last % layout.block_size,
        cu_seqlens=torch.arange(batch + 1, dtype=torch.int32),
        block_tables=tables,
        cache_lens=lens,
        logit_rows=torch.arange(batch),
        max_seqlen=1,
        max_context=context,
    )
    return pool, inputs


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a sum over memory that no cache holds."""
    size = 4 << 30 if device.type == "cuda" else 64 << 20
    array = torch.randint(0, 100, (size // 4,), dtype=torch.int32, device=device).view(torch.float32)
    best = 0.0
    for _ in range(7):
        seconds = _wall_seconds(lambda: float(array.amax()), 1)
        best = max(best, size / seconds)
    return best


def _device_seconds(run: Run, step: Callable[[], object], steps: int) -> float:
    if run.device.type != "cuda":
        return _wall_seconds(step, steps)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / steps


def _wall_seconds(step: Callable[[], object], steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps


def _graphs(args: argparse.Namespace) -> tuple[int, ...]:
    return tuple(args.batches)


def write_test_tokenizer(folder: Path) -> None:
    """The tests' own small tokenizer: ids it does not know decode to nothing."""
    import sys

    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tiny_tokenizer import write_tokenizer

    write_tokenizer(folder)


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
