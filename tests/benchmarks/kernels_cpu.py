"""Times each CPU op at the shapes of a 135M Llama, and latent attention at those of DeepSeek-V2-Lite, beside torch's
own operators and the memory floor.

    python -m tests.benchmarks.kernels_cpu [--threads 2] [--repeats 15] [--rows 1 4 16 64 512]

Weights rotate over more memory than the last-level cache holds at few rows, as a decode step's do. Every product is
checked before it is timed. Figures are min / median of the repeats, in microseconds a call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from deepseek_tgi.kv.layout import KVLayout, KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool
from tests.benchmarks.measure import circumstances, read_bandwidth_bytes_per_s

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
HEAD = (49152, 576)
GROUP = 64
ROTATED_BYTES = 96 << 20
FEW_ROWS = 16
SMALL_HEADS, LARGE_HEADS = (9, 3, 64), (32, 8, 128)
"""Query heads, KV heads and head size of the 135M Llama, and of 8B ones."""
LATENT = (16, 512, 64, 128, 128)
"""Heads, rank, rotary part, part without position and value of DeepSeek-V2-Lite."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call: the best and the middle of the repeats."""

    best: float
    median: float

    def line(self, name: str, work: float, size: float, floor: float) -> str:
        """`work` in operations, `size` in bytes of weights or pages, `floor` in seconds to read them."""
        return (
            f"  {name:30s} {self.best * 1e6:9.1f} / {self.median * 1e6:9.1f} us "
            f"{work / self.best * 1e-9:7.0f} GFLOP/s {size / self.best * 1e-9:6.1f} GB/s  floor {floor * 1e6:7.1f} us"
        )


def timed(calls: Sequence[Callable[[], object]], repeats: int) -> Timing:
    """Time all `calls` in a row, each repeat; the result is a call's share."""
    for call in calls:
        call()
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - started) / len(calls))
    return Timing(min(samples), statistics.median(samples))


def copies(rows: int, nbytes: int) -> int:
    """How many weights of `nbytes` to go round: enough to miss the caches at few rows, few enough to end at many."""
    return max(2, ROTATED_BYTES // nbytes) if rows <= FEW_ROWS else 2


def check(name: str, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bound: float) -> None:
    """Refuse to time what is wrong."""
    expected = x.double() @ weight.double().t()
    error = float((y - expected).abs().max() / expected.abs().max())
    if not error <= bound:
        raise SystemExit(f"{name}: relative error {error:.1e}, expected at most {bound:.0e}: not timed")


def random_int4(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, k = shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, k // GROUP), dtype=torch.uint8)
    return codes, zeros, (torch.rand(n, k // GROUP) * 0.02 + 0.001).half()


def int4_rows(sets: dict[str, KernelSet], shape: tuple[int, int], rows: int, repeats: int, bandwidth: float) -> None:
    n, k = shape
    x, work = torch.randn(rows, k), 2.0 * rows * n * k
    codes, zeros, scales = random_int4(shape)
    for name, kernels in sets.items():
        packed = kernels.pack_int4(codes, zeros, scales, GROUP)
        exact = kernels.compute_dtype is ComputeDtype.FLOAT32
        check(name, kernels.int4_linear(x, packed), x, packed.dequantise(), 1e-5 if exact else 2e-2)
        weights = [kernels.pack_int4(codes, zeros, scales, GROUP) for _ in range(copies(rows, packed.nbytes))]
        out = torch.empty(rows, n)
        calls = [partial(kernels.int4_linear, x, w, None, None, out) for w in weights]
        print(timed(calls, repeats).line(name, work, packed.nbytes, packed.nbytes / bandwidth))
    for name, dtype in (("torch linear bfloat16", torch.bfloat16), ("torch linear float32", torch.float32)):
        dense_row(name, dtype, shape, rows, repeats, bandwidth)


def dense_row(name: str, dtype: torch.dtype, shape: tuple[int, int], rows: int, repeats: int, bandwidth: float) -> None:
    x, weight = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    weights = [weight.clone() for _ in range(copies(rows, weight.nbytes))]
    calls = [partial(torch.nn.functional.linear, x, w) for w in weights]
    work = 2.0 * rows * shape[0] * shape[1]
    print(timed(calls, repeats).line(name, work, weight.nbytes, weight.nbytes / bandwidth))


def head_rows(sets: dict[str, KernelSet], rows: int, repeats: int, bandwidth: float) -> None:
    n, k = HEAD
    codes = torch.randint(-127, 128, (n, k // 32, 32)).float()
    codes[..., 0] = 127
    gridded = (codes * (torch.rand(n, k // 32, 1) * 0.01 + 0.001).half()).view(n, k).half()
    x, work = torch.randn(rows, k), 2.0 * rows * n * k
    for weight, storage in ((gridded, "on an int8 grid"), (torch.randn(n, k).bfloat16(), "bfloat16")):
        for name, kernels in sets.items():
            if "torch" in name:
                continue
            packed = kernels.pack_dense(weight)
            check(name, kernels.dense_linear(x, packed), x, weight.float(), 2e-2)
            timing = timed([partial(kernels.dense_linear, x, packed)], repeats)
            print(timing.line(f"{name}, {storage}", work, packed.nbytes, packed.nbytes / bandwidth))
    dense_row("torch linear bfloat16", torch.bfloat16, HEAD, rows, repeats, bandwidth)


@dataclass(frozen=True, slots=True)
class Case:
    """`tokens` new tokens of one request after `cached`, or, for 0 tokens, 16 requests of one token each."""

    heads: tuple[int, int, int]
    tokens: int
    cached: int


def attention_rows(kernels: KernelSet, mode: KVMode, case: Case, repeats: int, bandwidth: float) -> None:
    """Attention over one layer's pages, and what filling them took, a token."""
    heads, kv_heads, width = case.heads
    requests, each = (16, 1) if case.tokens == 0 else (1, case.tokens)
    cached = case.cached
    columns = -(-(cached + each) // 16)
    pool = KVPool(KVLayout(1, kv_heads, width, width, mode), requests * columns)
    tables = torch.randperm(requests * columns).view(requests, columns).int()
    everything = torch.randn(pool.num_slots, kv_heads, width)
    write = partial(kernels.kv_write, pool.view(0), everything, everything, torch.arange(pool.num_slots))
    written = timed([write], repeats).best / pool.num_slots
    positions = torch.arange(cached, cached + each, dtype=torch.int32).repeat(requests)
    inputs = ForwardInputs(
        torch.zeros(requests * each, dtype=torch.int64), positions, torch.zeros(requests * each, dtype=torch.int64),
        torch.arange(0, requests * each + 1, each, dtype=torch.int32), tables,
        torch.full((requests,), cached, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), each, cached + each,
    )  # fmt: skip
    q = torch.randn(requests * each, heads, width)
    timing = timed([lambda: kernels.paged_attention(q, pool.view(0), inputs, width**-0.5)], repeats)
    seen = requests * sum(cached + i + 1 for i in range(each))
    size = requests * (cached + each) * pool.layout.layer_bytes_per_token
    name = f"{mode.value}, {requests} x {each} at {cached}"
    line = timing.line(name, 4.0 * heads * width * seen, size, size / bandwidth)
    print(f"{line}, write {written * 1e6:.2f} us a token")


def latent_rows(kernels: KernelSet, mode: KVMode, tokens: int, cached: int, repeats: int, bandwidth: float) -> None:
    """As `attention_rows` with `tokens` of one request, over latents, in each form that fits."""
    heads, rank, rope, nope, value = LATENT
    length = cached + tokens
    pool = KVPool(LatentLayout(1, rank, rope, mode), -(-length // 16))
    kernels.latent_write(pool.latents(0), torch.randn(length, rank), torch.randn(length, rope), torch.arange(length))
    nothing = torch.zeros(tokens, dtype=torch.int64)
    inputs = ForwardInputs(
        nothing, nothing.int(), nothing, torch.tensor([0, tokens], dtype=torch.int32),
        torch.arange(pool.num_blocks, dtype=torch.int32).unsqueeze(0), torch.tensor([cached], dtype=torch.int32),
        nothing[:1], tokens, length,
    )  # fmt: skip
    up = kernels.pack_up(torch.randn(heads * (nope + value), rank) * rank**-0.5, heads, nope)
    q, out = torch.randn(tokens, heads, rope + nope), torch.empty(tokens, heads, value)
    pairs, made = tokens * cached + tokens * (tokens + 1) // 2, rank * (nope + value)
    work = {
        "absorbed": pairs * (rope + 2 * rank) + tokens * made,
        "expanded": pairs * (rope + nope + value) + length * made,
    }
    for form in ("absorbed", "expanded") if tokens > 1 else ("absorbed",):
        call = partial(kernels.latent_attention, q, pool.latents(0), up, inputs, scale=0.07, out=out, form=form)
        size = length * pool.layout.layer_bytes_per_token + up.nbytes
        name = f"{mode.value}, {tokens} at {cached}, {form}"
        print(timed([call], repeats).line(name, 2.0 * heads * work[form], size, size / bandwidth))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    options = parser.parse_args(argv)
    print(*(f"{name}: {value}" for name, value in circumstances().items()), sep="\n")
    bandwidth = read_bandwidth_bytes_per_s()
    print(f"memory read bandwidth: {bandwidth * 1e-9:.1f} GB/s")
    sets = {
        "ours bfloat16": select_kernels("cpu", ComputeDtype.BFLOAT16, "native", options.threads),
        "ours float32": select_kernels("cpu", ComputeDtype.FLOAT32, "native", options.threads),
        "torch int4pack bfloat16": select_kernels("cpu", ComputeDtype.BFLOAT16, "torch", options.threads),
    }
    for rows in options.rows:
        for name, shape in SHAPES.items():
            print(f"int4 {name} {shape[0]} x {shape[1]}, M={rows}")
            int4_rows(sets, shape, rows, options.repeats, bandwidth)
        if rows <= 64:
            print(f"head {HEAD[0]} x {HEAD[1]}, M={rows}")
            head_rows(sets, rows, options.repeats, bandwidth)
    for heads, steps in (
        (SMALL_HEADS, ((1, 127), (1, 511), (1, 8191), (0, 511), (512, 0))),
        (LARGE_HEADS, ((1, 511), (1, 8191))),
    ):
        print("attention, {} heads over {}, head size {}".format(*heads))
        for mode in KVMode:
            for step in steps:
                attention_rows(sets["ours bfloat16"], mode, Case(heads, *step), options.repeats, bandwidth)
    print("latent attention of DeepSeek-V2-Lite, 16 heads, rank 512")
    for mode, tokens, cached in (
        *((mode, 1, 4095) for mode in KVMode), (KVMode.BFLOAT16, 1, 511), (KVMode.BFLOAT16, 512, 0),
        (KVMode.BFLOAT16, 64, 512), (KVMode.BFLOAT16, 512, 2048),
    ):  # fmt: skip
        latent_rows(sets["ours bfloat16"], mode, tokens, cached, options.repeats, bandwidth)


if __name__ == "__main__":
    main()
