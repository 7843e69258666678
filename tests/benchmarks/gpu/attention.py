"""Decode attention of 32 query and 8 KV heads of 128 elements over pages in every format, against floor and target.

`python -m tests.benchmarks.gpu.attention [result.json]` on a machine with an NVIDIA GPU. The floor is the bytes of the
cache over what a copy moves in the same run; the peer, FlashInfer, is timed by `peers`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.cuda.heads import MODES
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.paged_attention.cpu import paged_attention
from deepseek_tgi.kernels.paged_attention.cuda import PagedDecode, shared_start
from deepseek_tgi.kernels.paged_attention.triton import TiledAttention
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool
from tests.benchmarks.gpu.timing import copy_bytes_per_s, graph_us

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16
SIZES = ((1, 2048), (1, 8192), (1, 32768), (32, 2048), (32, 8192), (32, 32768), (128, 2048), (128, 8192))
TARGETS_US = {
    ("bfloat16", 32, 8192): 277, ("int8", 32, 8192): 157, ("fp8_e4m3fn", 32, 8192): 212, ("int4", 32, 8192): 100,
    ("bfloat16", 32, 32768): 1067, ("int8", 32, 32768): 600, ("fp8_e4m3fn", 32, 32768): 800,
    ("int4", 32, 32768): 390, ("bfloat16", 1, 8192): 18, ("int8", 1, 8192): 18, ("fp8_e4m3fn", 1, 8192): 18,
    ("int4", 1, 8192): 18, ("bfloat16", 128, 2048): 288, ("fp8_e4m3fn", 128, 2048): 227,
}  # fmt: skip
"""Microseconds: FlashInfer's on an H200, with the gains that fewer bytes should bring."""
ROTATED_BYTES = 400 << 20
"""What launches of one graph read between them, so that none finds its pages in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    mode: str
    batch: int
    context: int
    us: float
    floor_us: float
    target_us: float | None

    @property
    def met(self) -> str:
        """Whether the target was met, in a word."""
        return "" if self.target_us is None else "met" if self.us <= self.target_us else "missed"


@dataclass(frozen=True, slots=True)
class Setting:
    """A filled pool of several layers and a decode step over it."""

    layers: list[LayerPages]
    inputs: ForwardInputs
    q: torch.Tensor
    out: torch.Tensor
    layer_bytes: int


def make_setting(
    mode: str, batch: int, context: int, num_layers: int | None = None, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> Setting:
    """Random keys and values in pages that lie in no order; as many layers as `ROTATED_BYTES` takes."""
    layout = KVLayout(1, kv_heads, WIDTH, WIDTH, KVMode(mode), BLOCK)
    layer_bytes = layout.layer_bytes_per_token * context * batch
    layers = num_layers or max(1, min(32, -(-ROTATED_BYTES // layer_bytes)))
    columns = -(-context // BLOCK)
    pool = KVPool(KVLayout(layers, kv_heads, WIDTH, WIDTH, KVMode(mode), BLOCK), batch * columns, "cuda")
    views = [pool.view(layer) for layer in range(layers)]
    for pages in views:
        fill(pages)
    tables = torch.randperm(batch * columns, device="cuda").view(batch, columns).int()
    cached = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    inputs = ForwardInputs(
        torch.zeros(batch, dtype=torch.int64, device="cuda"), cached, torch.full((batch,), -1, device="cuda"),
        torch.arange(batch + 1, device="cuda").int(), tables, cached, torch.arange(batch, device="cuda"), 1, context,
    )  # fmt: skip
    q = torch.randn(batch, heads, WIDTH, device="cuda").bfloat16()
    return Setting(views, inputs, q, torch.full_like(q, float("nan")), layer_bytes)


def fill(pages: LayerPages) -> None:
    """Numbers like those of a model."""
    for store in (pages.k, pages.v):
        for first in range(0, store.shape[0], 2048):
            part = store[first : first + 2048]
            if store.dtype != torch.uint8:
                part.copy_(torch.randn(part.shape, device=part.device))
            elif pages.mode == "fp8_e4m3fn":
                codes = (torch.randn(part.shape, device=part.device) * 100).clamp(-448, 448)
                part.copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8))
            else:
                part.copy_(torch.randint(0, 256, part.shape, device=part.device, dtype=torch.uint8))
    for scales in (pages.k_scale, pages.v_scale):
        if scales is None:
            continue
        if scales.dtype == torch.uint8:
            scales.copy_(torch.randint(0x80, 0x90, scales.shape, device=scales.device, dtype=torch.uint8))
            continue
        scales.copy_(torch.rand(scales.shape, device=scales.device) * 0.01 + 0.01)
        if scales.shape[-1] == 2:
            scales[..., 1] = -2.5


def measure(mode: str, batch: int, context: int, bytes_per_s: float, decode: PagedDecode) -> Row:
    """Time one size."""
    s = make_setting(mode, batch, context)
    us = graph_us([partial(decode, s.q, pages, s.inputs, WIDTH**-0.5, s.out) for pages in s.layers])
    assert bool(s.out.isfinite().all())
    return Row(mode, batch, context, us, s.layer_bytes / bytes_per_s * 1e6, TARGETS_US.get((mode, batch, context)))


def measure_prompt(mode: str, tokens: int, cached: int) -> dict[str, float | str]:
    """Time one request's prompt or chunk in Triton."""
    s = make_setting(mode, 1, tokens + cached, 1)
    before = torch.full((1,), cached, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    inputs = replace(s.inputs, cu_seqlens=starts, cache_lens=before, max_seqlen=tokens)
    q = torch.randn(tokens, HEADS, WIDTH, device="cuda").bfloat16()
    out = torch.full_like(q, float("nan"))
    attend = TiledAttention(paged_attention)
    us = graph_us([partial(attend, q, s.layers[0], inputs, WIDTH**-0.5, out)] * 2, 5)
    assert bool(out.isfinite().all())
    tflops = 4 * WIDTH * HEADS * tokens * (cached + (tokens + 1) / 2) / us / 1e6
    print(f"{mode:12} prompt of {tokens} behind {cached}: {us:8.1f} us, {tflops:.0f} TFLOP/s", flush=True)
    return {"mode": mode, "tokens": tokens, "cached": cached, "us": us, "tflops": tflops}


def main() -> None:
    """Measure, print and save."""
    device = torch.device("cuda:0")
    machine = machine_of(device)
    decode = PagedDecode(
        machine.programs, machine.multiprocessors, device, start=shared_start(machine.programs, device)
    )
    bytes_per_s = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name(device)}: copies move {bytes_per_s / 1e12:.2f} TB/s")
    rows = []
    for mode in (mode for mode in MODES if mode != "float16"):
        for batch, context in SIZES:
            row = measure(mode, batch, context, bytes_per_s, decode)
            rows.append(row)
            print(
                f"{mode:12} {batch:4} x {context:6}: {row.us:8.1f} us, floor {row.floor_us:7.1f} "
                f"({row.floor_us / row.us:4.0%}) {row.target_us or '':>6} {row.met}",
                flush=True,
            )
            torch.cuda.empty_cache()
    result: dict[str, object] = {"bytes_per_s": bytes_per_s, "rows": [asdict(row) for row in rows]}
    save(result)
    result["prompts"] = [measure_prompt(mode, 4096, 0) for mode in ("bfloat16", "int8", "int4")]
    save(result)


def save(result: dict[str, object]) -> None:
    """Write what is known so far to the file named on the command line, if one is."""
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
