"""One GPU beside two: decode and prefill of whole models of random numbers, each rank a process on its own GPU.

    python -m tests.benchmarks.gpu.ranks [--models llama lite] [--worlds 1 2] [--cache int8] [--json FILE]

Steps are bare (`ModelAdapter.step`), recorded in CUDA graphs where they decode, with the ranks' sums inside; a decode
step's time holds the arg-max read back. All ranks take the same steps; rank 0's times are told. `sum` is one sum of so
many rows over the ranks as steps take it, `NCCL sum` the same by NCCL alone; 64 of them are recorded in one graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.decode_graphs import CudaCapture
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.rendezvous import Meeting, join
from tests.benchmarks.gpu.random_model import RandomBackend, write_folder
from tests.benchmarks.gpu.whole_model import (
    MAX_TOKENS,
    MODELS,
    Run,
    cache_and_inputs,
    prompt_inputs,
    record,
    write_test_tokenizer,
)
from tests.benchmarks.measure import circumstances

STEPS, REPEATS = 20, 5
SUMS, SUM_STEPS = 64, 5
LIMIT_S = 240.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; with `--json`, save as JSON. 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama", "lite"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cache", default="int8")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 4096])
    parser.add_argument("--layers", type=int, default=0, help="cut models short")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, dest="out")
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=29511, help="where ranks meet")
    args = parser.parse_args(argv)
    if args.as_rank is not None:
        for name in args.models:
            print(json.dumps({"model": name, "rows": list(map(dict, measured(name, args)))}), flush=True)
        return 0
    rows: dict[str, dict[int, Any]] = {}
    for world in args.worlds:
        for name in args.models:
            found = of_all_ranks(name, world, args)
            if found is None:
                return 1
            rows.setdefault(name, {})[world] = found
            show(name, world, rows[name])
            if args.out is not None:
                args.out.write_text(json.dumps({"circumstances": circumstances(), "models": rows}, indent=1))
    return 0


def of_all_ranks(name: str, world: int, args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Rank 0's rows; None if a rank failed."""
    argv = [sys.executable, "-m", __spec__.name, "--models", name, "--worlds", str(world), "--cache", args.cache]
    argv += ["--batches", *map(str, args.batches), "--context", str(args.context), "--layers", str(args.layers)]
    argv += ["--prompts", *map(str, args.prompts), "--port", str(args.port), "--device", args.device]
    ranks = [
        subprocess.Popen([*argv, "--as-rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        told = []
    for rank in ranks:
        rank.kill()
    if not told or any(rank.returncode for rank in ranks):
        print(f"{name} on {world}: a rank failed or took over {LIMIT_S:g} s")
        return None
    rows: list[dict[str, Any]] = json.loads(told[0].splitlines()[-1])["rows"]
    return rows


def measured(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one rank."""
    world, rank = args.worlds[0], args.as_rank
    options = LoadOptions(
        device=args.device,
        kv_cache_dtype=args.cache,
        cuda_graphs=tuple(args.batches),
        rank=rank,
        world_size=world,
        master_port=args.port,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), MODELS[name], write_test_tokenizer, args.layers)
        adapter = RandomBackend.get_model(folder, options=options)
    run = Run(MODELS[name], adapter, torch.device(adapter.info.device))
    rows = [decode_row(run, batch, args.context) for batch in args.batches]
    rows += [prefill_row(run, tokens) for tokens in args.prompts]
    if adapter.ranks is not None and run.device.type == "cuda":
        hidden = int(MODELS[name].config["hidden_size"])
        meeting = Meeting(rank, world, port=args.port + 1)
        groups = {"sum": adapter.ranks, "NCCL sum": join(meeting, run.device)}
        counts = [*args.batches, *args.prompts]
        rows += [sum_row(run, name, group, count, hidden) for count in counts for name, group in groups.items()]
        groups["NCCL sum"].close()
    adapter.close()
    return rows


def decode_row(run: Run, batch: int, context: int) -> dict[str, Any]:
    """A decode step of `batch` requests with `context` tokens each."""
    pool, inputs = cache_and_inputs(run, batch, context)
    run.adapter.open_pool(pool, batch, MAX_TOKENS)
    seconds = timed(lambda: run.adapter.step(inputs, pool).argmax(-1).tolist(), STEPS)
    run.adapter.close_pool()
    pool.close()
    return {"what": "decode", "batch": batch, "context": context, **seconds}


def prefill_row(run: Run, tokens: int) -> dict[str, Any]:
    """A prompt in one step."""
    pool, inputs = prompt_inputs(run, tokens)
    record(run, pool, tokens)
    seconds = timed(lambda: run.adapter.step(inputs, pool).argmax(-1).tolist(), 1)
    run.adapter.close_pool()
    pool.close()
    return {"what": "prefill", "tokens": tokens, **seconds}


def sum_row(run: Run, what: str, group: Any, rows: int, hidden: int) -> dict[str, Any]:
    """Sums of `[rows, hidden] float32` over the ranks of `group`."""
    assert isinstance(group, RankGroup)
    x = torch.zeros(rows, hidden, device=run.device)

    def sums() -> None:
        for _ in range(SUMS):
            group.all_reduce(x)

    replay = CudaCapture(run.device)(sums)
    seconds = timed(partial(_finished, replay), SUM_STEPS)
    return {"what": what, "rows": rows, **{key: value / SUMS for key, value in seconds.items()}}


def _finished(work: Callable[[], None]) -> None:
    work()
    torch.cuda.synchronize()


def timed(work: Callable[[], object], steps: int) -> dict[str, float]:
    """Median, least and most seconds of one `work` in `REPEATS` rows of `steps`; ranks take the same number."""
    for _ in range(3):
        work()
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(steps):
            work()
        found.append((time.perf_counter() - started) / steps)
    return {"seconds": statistics.median(found), "least_s": min(found), "most_s": max(found)}


def show(name: str, world: int, by_world: dict[int, Any]) -> None:
    """A line for each row of `world` ranks, with what they bring over one."""
    alone = {_key(row): row["seconds"] for row in by_world.get(1, ())}
    print(f"{MODELS[name].name} on {world} GPU{'s' * (world > 1)}")
    for row in by_world[world]:
        gain = f", {alone[_key(row)] / row['seconds']:.2f} times as fast as one" if _key(row) in alone else ""
        of = " ".join(f"{key} {row[key]}" for key in ("batch", "context", "tokens", "rows") if key in row)
        unit, factor = ("us", 1e6) if "rows" in row else ("ms", 1e3)
        spread = f"{row['least_s'] * factor:.3f}-{row['most_s'] * factor:.3f}"
        print(f"  {row['what']} {of}: {row['seconds'] * factor:.3f} {unit} ({spread}){gain}", flush=True)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["what"], row.get("batch"), row.get("tokens"), row.get("rows")


if __name__ == "__main__":
    sys.exit(main())
