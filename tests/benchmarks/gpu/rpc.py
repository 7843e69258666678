"""Decoding through a shard of its own process, as a router asks for it, beside the bare steps."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.random_model import BACKEND

TESTS = Path(__file__).resolve().parents[2]
NEW_TOKENS = 64
PREFILL_TOKENS = 8192


def through_rpcs(
    model: Path, cache: str, args: argparse.Namespace, bare: Mapping[tuple[int, int], float]
) -> Iterator[dict[str, Any]]:
    """Serve `model` and decode the smaller batches at the shortest context.

    `bare` are steps without a shard, each launched before the last one's tokens are read, as the shard does it.
    """
    sys.path.append(str(TESTS))
    from shard_client import ShardClient, ShardProcess, serve_argv, serve_environment

    context = min(args.contexts)
    with tempfile.TemporaryDirectory() as folder:
        uds = Path(folder) / "shard"
        environment = {
            "DEEPSEEK_TGI_BACKEND": BACKEND,
            "DEEPSEEK_TGI_KERNELS": args.kernels,
            "DEEPSEEK_TGI_DEVICE": args.device,
            "DEEPSEEK_TGI_KV_CACHE_DTYPE": cache,
            "CUDA_GRAPHS": ",".join(map(str, args.batches)),
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        }
        shard = ShardProcess.spawn(serve_argv(str(model), uds), serve_environment(environment), uds)
        try:
            shard.wait_ready()
            client = ShardClient(shard.socket)
            client.clear()
            limits = client.warmup(PREFILL_TOKENS, context, context + NEW_TOKENS + 16)
            for batch in args.batches:
                if batch * (context + NEW_TOKENS + 32) <= limits.max_supported_total_tokens:
                    yield decode_rows(client, batch, context, bare.get((batch, context)))
            client.close()
        finally:
            if shard.process.poll() is not None:
                print(shard.words()[-4000:])
            shard.stop()


def decode_rows(client: Any, batch: int, context: int, bare_s: float | None) -> dict[str, Any]:
    """Prompts of `context` - `NEW_TOKENS` tokens each, prefilled in one call each, then decoded together."""
    from deepseek_tgi.pb import generate_pb2 as pb

    prompt = context - NEW_TOKENS
    blocks = -(-(context + 1) // 16)
    batches = []
    began = time.perf_counter()
    for index in range(batch):
        own = list(range(1 + index * blocks, 1 + (index + 1) * blocks))
        request = pb.Request(
            id=index,
            inputs="a" * prompt,
            input_chunks=pb.Input(chunks=[pb.InputChunk(text="a b" * prompt)]),
            truncate=prompt,
            add_special_tokens=True,
            parameters=pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0),
            stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=NEW_TOKENS + 1, ignore_eos_token=True),
            blocks=own,
            slots=[own[p // 16] * 16 + p % 16 for p in range(prompt + NEW_TOKENS)],
        )
        batches.append(client.prefill([request], index).batch)
    prefilled = time.perf_counter() - began
    samples, forward, choosing = [], [], []
    for step in range(NEW_TOKENS - 1):
        started = time.perf_counter()
        answer = client.decode(batches)
        took = time.perf_counter() - started
        batches = [answer.batch]
        if step >= 8:
            samples.append(took)
            forward.append(answer.forward_ns * 1e-9)
            choosing.append(answer.decode_ns * 1e-9)
    client.clear()
    middle = statistics.median(samples)
    row = {
        "what": "rpc decode", "batch": batch, "context": context, "wall_s": middle,
        "wall_spread_s": [min(samples), max(samples)], "tokens_per_s": batch / middle,
        "forward_s": statistics.median(forward), "choice_s": statistics.median(choosing), "bare_s": bare_s,
        "prefill_tokens_per_s": batch * prompt / prefilled,
    }  # fmt: skip
    gap = "" if bare_s is None else f", {(middle - bare_s) * 1e3:.3f} ms over the bare step"
    print(
        f"  RPC decode {batch:3d} x {context:5d}: {middle * 1e3:7.3f} ms, {batch / middle:8.0f} tok/s (launching the "
        f"step {row['forward_s'] * 1e3:.3f} ms, its end and the choice {row['choice_s'] * 1e3:.3f} ms){gap}; prefill "
        f"{row['prefill_tokens_per_s']:.0f} tok/s"
    )
    return row
