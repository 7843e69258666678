"""Decode attention of DeepSeek-V2-Lite on the CPU: one latent a token, beside the keys and values of every head.

    python -m tests.benchmarks.latent_cpu [--context 4096] [--requests 1 8] [--threads 2] [--json FILE]

All sides hold the same tokens and answer the same queries, in one process and by turns. `latent` sides are the absorbed
form, up-projections of query and answer included; `heads` sides read stored keys and values, 192 + 128 wide or, as TGI
keeps them, 192 + 192 (making the new token's keys and values is not counted against them). Calls go round more layers
than a cache holds, as a model's step does. Answers are compared before anything is timed. Figures are milliseconds a
layer; bytes are those of the context, as stored.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.latent_attention import PackedUp
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from deepseek_tgi.kv.layout import CacheLayout, KVLayout, KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool
from tests.benchmarks.measure import Samples, circumstances, read_bandwidth_bytes_per_s
from tests.benchmarks.quiet import Quiet

HEADS, RANK, NOPE, ROPE, VALUE = 16, 512, 128, 64, 128
WIDTH, MODEL_LAYERS = NOPE + ROPE, 27
SCALE = WIDTH**-0.5
BASE = "heads, bfloat16, as TGI keeps them"
BOUNDS = {KVMode.BFLOAT16: 0.02, KVMode.INT8: 0.03, KVMode.FP8: 0.06, KVMode.INT4: 0.25}
"""Largest error of an answer, of the answers' size: what the format alone costs on random tokens, and some room."""
ROTATED_BYTES = 160 << 20
SAMPLE_S = 0.2
CONTEXT, REQUESTS = 4096, (1, 8)


@dataclass(frozen=True, slots=True)
class Tokens:
    """`latent [B, L, R]`, `rope [B, L, Dr]` of all contexts, `q [B, H, Dr + Dn]` of each one's last token, and the
    up-projection `up [H, Dn + Dv, R]`.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    q: torch.Tensor
    up: torch.Tensor

    def heads(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[L, H, Dr + Dn]` and values `[L, H, Dv]` of one context."""
        wide = torch.einsum("lr,hdr->lhd", self.latent[request], self.up)
        rope = self.rope[request].unsqueeze(1).expand(-1, HEADS, -1)
        return torch.cat((rope, wide[..., :NOPE]), 2), wide[..., NOPE:]

    def answer(self) -> torch.Tensor:
        """Attention written out: `[B, H, Dv]`."""
        rows = []
        for request, q in enumerate(self.q):
            keys, values = self.heads(request)
            weights = (torch.einsum("hd,lhd->hl", q, keys) * SCALE).softmax(1)
            rows.append(torch.einsum("hl,lhd->hd", weights, values))
        return torch.stack(rows)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to keep the tokens: a pool of as many layers as calls go round, and the call of one layer."""

    name: str
    mode: KVMode
    pool: KVPool
    run: Callable[[int], torch.Tensor]

    @property
    def layer_bytes_per_token(self) -> int:
        return self.pool.layout.layer_bytes_per_token


def make_tokens(requests: int, context: int) -> Tokens:
    """Random tokens whose scores spread over a few units, so that no answer is a mere mean."""
    gen = torch.Generator().manual_seed(0)
    latent = torch.randn(requests, context, RANK, generator=gen)
    up = torch.randn(HEADS, NOPE + VALUE, RANK, generator=gen) / math.sqrt(RANK)
    rope = torch.randn(requests, context, ROPE, generator=gen)
    return Tokens(latent, rope, 2 * torch.randn(requests, HEADS, WIDTH, generator=gen), up)


def step_inputs(requests: int, context: int, block_size: int) -> ForwardInputs:
    """One decode step of `requests` contexts whose blocks lie about the pool."""
    columns = context // block_size
    tables = torch.randperm(requests * columns, generator=torch.Generator().manual_seed(1)).view(requests, columns)
    last = torch.full((requests,), context - 1, dtype=torch.int32)
    slots = tables[:, -1].long() * block_size + block_size - 1
    return ForwardInputs(
        torch.zeros(requests, dtype=torch.int64), last, slots, torch.arange(requests + 1, dtype=torch.int32),
        tables.int(), last, torch.arange(requests), 1, context,
    )  # fmt: skip


def make_pool(layout: Callable[[int], CacheLayout], tokens: Tokens) -> KVPool:
    """A pool that holds every context in each of as many layers as `ROTATED_BYTES` take, at least two."""
    requests, context, _ = tokens.latent.shape
    one = layout(1)
    layers = max(2, -(-ROTATED_BYTES // (one.layer_bytes_per_token * requests * context)))
    return KVPool(layout(layers), requests * context // one.block_size)


def slots_of(inputs: ForwardInputs, request: int, block_size: int) -> torch.Tensor:
    """Places of all tokens of one context."""
    return (inputs.block_tables[request].long().unsqueeze(1) * block_size + torch.arange(block_size)).flatten()


def latent_side(kernels: KernelSet, tokens: Tokens, inputs: ForwardInputs, mode: KVMode, up: PackedUp) -> Side:
    """Latents in `mode`."""
    pool = make_pool(lambda layers: LatentLayout(layers, RANK, ROPE, mode), tokens)
    for layer in range(pool.layout.num_layers):
        for request, (latent, rope) in enumerate(zip(tokens.latent, tokens.rope, strict=True)):
            kernels.latent_write(pool.latents(layer), latent, rope, slots_of(inputs, request, pool.layout.block_size))
    out = torch.empty(len(tokens.q), HEADS, VALUE)

    def run(layer: int) -> torch.Tensor:
        pages = pool.latents(layer)
        return kernels.latent_attention(tokens.q, pages, up, inputs, scale=SCALE, out=out, form="absorbed")

    return Side(f"latent, {mode.value}", mode, pool, run)


def heads_side(
    kernels: KernelSet, tokens: Tokens, inputs: ForwardInputs, mode: KVMode, value_width: int, name: str
) -> Side:
    """Keys and values of every head in `mode`, values padded with zeros to `value_width`."""
    pool = make_pool(lambda layers: KVLayout(layers, HEADS, WIDTH, value_width, mode), tokens)
    for request in range(len(tokens.q)):
        keys, values = tokens.heads(request)
        values = torch.nn.functional.pad(values, (0, value_width - VALUE))
        for layer in range(pool.layout.num_layers):
            kernels.kv_write(pool.view(layer), keys, values, slots_of(inputs, request, pool.layout.block_size))
    out = torch.empty(len(tokens.q), HEADS, value_width)

    def run(layer: int) -> torch.Tensor:
        return kernels.paged_attention(tokens.q, pool.view(layer), inputs, SCALE, out)[..., :VALUE]

    return Side(name, mode, pool, run)


def make_sides(kernels: KernelSet, tokens: Tokens, inputs: ForwardInputs) -> list[Side]:
    """All ways to keep `tokens`, the one all are compared with first."""
    up = kernels.pack_up(tokens.up.flatten(0, 1), HEADS, NOPE)
    heads = [
        heads_side(kernels, tokens, inputs, KVMode.BFLOAT16, WIDTH, BASE),
        heads_side(kernels, tokens, inputs, KVMode.BFLOAT16, VALUE, "heads, bfloat16"),
        heads_side(kernels, tokens, inputs, KVMode.INT8, VALUE, "heads, int8"),
    ]
    modes = (KVMode.BFLOAT16, KVMode.INT8, KVMode.FP8, KVMode.INT4)
    return heads + [latent_side(kernels, tokens, inputs, mode, up) for mode in modes]


def check(side: Side, answer: torch.Tensor) -> float:
    """Error of the side's answer. Refuses to time what is wrong."""
    error = float((side.run(0) - answer).norm() / answer.norm())
    if not error <= BOUNDS[side.mode]:
        raise SystemExit(f"{side.name}: error {error:.3f}, expected at most {BOUNDS[side.mode]}: not timed")
    return error


def sample(side: Side, calls: int) -> float:
    """Milliseconds a call over `calls` calls, going round the layers."""
    layers = side.pool.layout.num_layers
    started = time.perf_counter()
    for call in range(calls):
        side.run(call % layers)
    return (time.perf_counter() - started) / calls * 1e3


def measure_requests(kernels: KernelSet, requests: int, context: int, repeats: int, quiet: Quiet) -> dict[str, Any]:
    """All sides by turns at one number of requests."""
    tokens = make_tokens(requests, context)
    inputs = step_inputs(requests, context, 16)
    sides = make_sides(kernels, tokens, inputs)
    answer = tokens.answer()
    errors = {side.name: check(side, answer) for side in sides}
    calls = {side.name: max(2, round(SAMPLE_S * 1e3 / sample(side, side.pool.layout.num_layers))) for side in sides}
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(repeats):
        for side in sides:
            taken[side.name].append(quiet.run(lambda side=side: sample(side, calls[side.name])))  # type: ignore[misc]
    base = Samples(tuple(taken[BASE])).median
    figures: dict[str, Any] = {"requests": requests, "context": context, "sides": {}}
    for side in sides:
        samples = Samples(tuple(taken[side.name]))
        read = side.layer_bytes_per_token * requests * context
        figures["sides"][side.name] = {
            "ms": samples.to_json(),
            "error": errors[side.name],
            "bytes_per_token": side.layer_bytes_per_token * MODEL_LAYERS,
            "bytes_read": read,
            "bytes_per_s": read / samples.median * 1e3,
            "times_as_fast": base / samples.median,
        }
        side.pool.close()
    return figures


def measure(
    requests: Sequence[int] = REQUESTS,
    context: int = CONTEXT,
    threads: int = 0,
    repeats: int = 7,
    quiet: Quiet | None = None,
) -> dict[str, Any]:
    """All figures of a run as JSON's types; what `print_report` takes."""
    quiet = quiet or Quiet(required=True)
    bandwidth = quiet.run(read_bandwidth_bytes_per_s)
    kernels = select_kernels("cpu", ComputeDtype.BFLOAT16, "native", threads)
    return {
        "layer": f"{HEADS} heads, keys {ROPE} + {NOPE}, values {VALUE}, latents {RANK}, {kernels.compute_dtype.value}",
        "kernel_threads": kernels.num_threads,
        "read_bytes_per_s": bandwidth,
        "figures": [measure_requests(kernels, count, context, repeats, quiet) for count in requests],
        "discarded_as_disturbed": quiet.discarded,
    }


def print_report(report: dict[str, Any]) -> None:
    """What `measure` found, a line for each side."""
    print(f"{report['layer']}; {report['kernel_threads']} threads")
    print(f"memory reads {report['read_bytes_per_s'] / 1e9:.1f} GB/s")
    for figures in report["figures"]:
        print(f"\n{figures['requests']} x 1 token at {figures['context']}")
        for name, side in figures["sides"].items():
            ms, rate = side["ms"], side["bytes_per_s"]
            share = rate / report["read_bytes_per_s"]
            print(
                f"  {name:<36} {ms['median']:8.3f} ms ({ms['min']:.3f}-{ms['max']:.3f}), {side['times_as_fast']:5.2f} "
                f"times as fast, {side['bytes_per_token']:7} bytes a token, {rate / 1e9:5.1f} GB/s, {share:4.0%} of "
                f"the memory's, error {side['error']:.4f}"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--context", type=int, default=CONTEXT, help="a multiple of 16")
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--threads", type=int, default=0, help="0: all this process may use")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="measure although the machine is busy with something else")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    options = parser.parse_args(words)
    facts = circumstances() | {"command": shlex.join(["python", "-m", "tests.benchmarks.latent_cpu", *words])}
    quiet = Quiet(required=not options.busy)
    report = facts | measure(options.requests, options.context, options.threads, options.repeats, quiet)
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
