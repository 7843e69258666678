"""Native calls that take long let other threads of the interpreter run: the thread that answers probes is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from deepseek_tgi.kv.layout import KVLayout, KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

Call = Callable[[], object]
TRIES = 8
"""A machine that has other things to do may keep a thread waiting for a whole call."""


def silu_mul(kernels: KernelSet) -> Call:
    gate_up, out = torch.ones(4096, 16384), torch.empty(4096, 8192)
    return lambda: kernels.silu_mul(gate_up, out)


def rms_norm(kernels: KernelSet) -> Call:
    x, weight = torch.ones(16384, 4096), torch.rand(4096)
    return lambda: kernels.rms_norm(x, weight, 1e-6, x)


def rope(kernels: KernelSet) -> Call:
    q, k = torch.ones(20000, 40, 64), torch.ones(20000, 8, 64)
    positions, table = torch.arange(20000, dtype=torch.int32), torch.rand(20000, 64)
    return lambda: kernels.rope(q, k, positions, table)


def kv_write(kernels: KernelSet) -> Call:
    pool = KVPool(KVLayout(1, 8, 128, 128, KVMode.INT4), 64)
    k, v, slots = torch.randn(1000, 8, 128), torch.randn(1000, 8, 128), torch.arange(1000)
    return lambda: kernels.kv_write(pool.view(0), k, v, slots)


def latent_write(kernels: KernelSet) -> Call:
    pool = KVPool(LatentLayout(1, 512, 64, KVMode.INT4), 300)
    latent, rotary, slots = torch.randn(4500, 512), torch.randn(4500, 64), torch.arange(4500)
    return lambda: kernels.latent_write(pool.latents(0), latent, rotary, slots)


def latent_prepare(kernels: KernelSet) -> Call:
    count = 6000
    pool = KVPool(LatentLayout(1, 512, 64, KVMode.INT8), 380)
    q, latent, rotary = torch.randn(count, 16, 192), torch.randn(count, 512), torch.randn(count, 64)
    inputs = ForwardInputs(
        input_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.arange(count, dtype=torch.int32),
        slots=torch.arange(count),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        block_tables=torch.arange(380, dtype=torch.int32).view(1, -1),
        cache_lens=torch.zeros(1, dtype=torch.int32),
        logit_rows=torch.zeros(1, dtype=torch.int64),
        max_seqlen=count,
        max_context=count,
    )
    weight, table = torch.rand(512), torch.rand(count, 64)
    return lambda: kernels.latent_prepare(
        q, latent, rotary, pool.latents(0), inputs, norm_weight=weight, eps=1e-6, cos_sin=table
    )


def route(kernels: KernelSet) -> Call:
    logits = torch.rand(200000, 256)
    return lambda: kernels.route(logits, None, Routing(256, 8, Scoring.SOFTMAX, GroupRank.NONE, 1, 1, False, 1.0))


def longest_wait_s(call: Call) -> float:
    """How long this thread had to stand still, at most, while another one made the call."""
    thread = threading.Thread(target=call)
    times = [time.perf_counter()]
    thread.start()
    while thread.is_alive():
        times.append(time.perf_counter())
    times.append(time.perf_counter())
    return max(after - before for before, after in pairwise(times))


def seconds_of(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@pytest.mark.parametrize(
    "make",
    [silu_mul, rms_norm, rope, kv_write, latent_write, latent_prepare, route],
    ids=lambda f: f.__name__,
)
def test_others_run_meanwhile(make: Callable[[KernelSet], Call]) -> None:
    call = make(select_kernels("cpu", wish="native", num_threads=1))
    call()
    alone = min(seconds_of(call) for _ in range(3))
    waits = [longest_wait_s(call) for _ in range(TRIES)]
    assert min(waits) < 0.5 * alone, f"waited {waits} s for calls of {alone} s"
