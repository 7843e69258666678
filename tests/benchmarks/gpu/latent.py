"""Latent decode attention (MLA) over pages in every format, 16 and 128 heads, against floor and target.

`python -m tests.benchmarks.gpu.latent [result.json]` on a machine with an NVIDIA GPU. What is timed is what a peer's
kernel does: queries and results in latent space; the products with the up-projection come on top. The floor is the
larger of the cache's bytes over what a copy moves and of the multiply-adds over what a large bfloat16 product does,
both measured in the same run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial

import torch

from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.latent_attention.decode import RANK, ROPE, LatentDecode
from deepseek_tgi.kernels.pages import LatentPages
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool
from tests.benchmarks.gpu.timing import copy_bytes_per_s, graph_us

BLOCK = 16
SCALE = 192**-0.5
MODES = ("bfloat16", "int8", "fp8_e4m3fn", "int4")
SIZES = tuple((batch, context) for batch in (1, 32, 128) for context in (2048, 8192, 32768))
TARGETS_US = {
    (16, "bfloat16", 32, 8192): 85.1, (16, "bfloat16", 32, 32768): 289, (16, "bfloat16", 128, 2048): 83.1,
    (16, "int8", 32, 8192): 53, (16, "int8", 32, 32768): 195, (16, "int4", 32, 8192): 36, (16, "int4", 32, 32768): 130,
    **{(16, mode, 1, 8192): 25.1 for mode in MODES},
    **{(128, mode, 32, 8192): 141 for mode in ("int8", "int4")},
    **{(128, mode, 32, 32768): 527 for mode in ("int8", "int4")},
}  # fmt: skip
"""Microseconds: FlashInfer's bfloat16 on an H200, and what fewer bytes should make of it."""
ROTATED_BYTES = 300 << 20
"""What the launches of one graph read between them, so that none finds its pages in the L2 cache."""
LARGEST_POOL = 24 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    heads: int
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
    """Filled pages of some layers and a decode step over them."""

    layers: list[LatentPages]
    step: tuple[torch.Tensor, torch.Tensor]
    layer_bytes: int

    def queries(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed and rotary parts, as a model leaves them."""
        batch = len(self.step[1])
        absorbed = torch.randn(heads, batch, RANK, device="cuda").bfloat16()
        return absorbed, torch.randn(batch, heads, 192, device="cuda").bfloat16().transpose(0, 1)[..., :ROPE]


def make_setting(mode: str, batch: int, context: int) -> Setting:
    """Random latents in pages that lie in no order; as many layers as `ROTATED_BYTES` takes."""
    layout = LatentLayout(1, RANK, ROPE, KVMode(mode), BLOCK)
    layer_bytes = layout.layer_bytes_per_token * context * batch
    layers = max(1, min(32, -(-ROTATED_BYTES // layer_bytes)))
    columns = -(-context // BLOCK)
    pool = KVPool(LatentLayout(layers, RANK, ROPE, KVMode(mode), BLOCK), batch * columns, "cuda")
    views = [pool.latents(layer) for layer in range(layers)]
    for pages in views:
        fill(pages)
    tables = torch.randperm(batch * columns, device="cuda").view(batch, columns).int()
    cached = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
    return Setting(views, (tables, cached), layer_bytes)


def fill(pages: LatentPages) -> None:
    """Numbers like those of a model."""
    for store in (pages.latent, pages.rope):
        for part in torch.split(store, 4096):
            if store.dtype != torch.uint8:
                part.copy_(torch.randn(part.shape, device=part.device))
            elif pages.mode == "fp8_e4m3fn":
                codes = (torch.randn(part.shape, device=part.device) * 100).clamp(-448, 448)
                part.copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8))
            else:
                part.copy_(torch.randint(0, 256, part.shape, device=part.device, dtype=torch.uint8))
    if pages.scale is None:
        return
    if pages.scale.dtype == torch.uint8:
        pages.scale.copy_(torch.randint(0x48, 0x50, pages.scale.shape, device="cuda", dtype=torch.uint8))
    else:
        pages.scale.copy_(torch.rand(pages.scale.shape, device="cuda") * 0.01 + 0.01)


def flops_per_s() -> float:
    """What a large bfloat16 product does in a second."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / (graph_us([lambda: torch.mm(a, b, out=out)] * 3) * 1e-6)


def measure(decode: LatentDecode, heads: int, mode: str, s: Setting, ceilings: tuple[float, float]) -> Row:
    """Time one size."""
    batch, context = s.step[0].shape[0], s.step[0].shape[1] * BLOCK
    absorbed, rotary = s.queries(heads)
    us = graph_us([partial(decode, absorbed, rotary, p, s.step, SCALE) for p in s.layers])
    assert bool(decode(absorbed, rotary, s.layers[0], s.step, SCALE).isfinite().all())
    work = 2 * heads * (2 * RANK + ROPE) * batch * context
    floor = max(s.layer_bytes / ceilings[0], work / ceilings[1]) * 1e6
    return Row(heads, mode, batch, context, us, floor, TARGETS_US.get((heads, mode, batch, context)))


def main() -> None:
    """Measure, print and save."""
    device = torch.device("cuda:0")
    machine = machine_of(device)
    decode = LatentDecode(machine.programs, machine.multiprocessors, machine.capability)
    ceilings = copy_bytes_per_s(), flops_per_s()
    print(
        f"{torch.cuda.get_device_name(device)}: copies {ceilings[0] / 1e12:.2f} TB/s, {ceilings[1] / 1e12:.0f} TFLOP/s"
    )
    rows = []
    for mode in MODES:
        for batch, context in SIZES:
            s = make_setting(mode, batch, context)
            for heads in (16, 128):
                row = measure(decode, heads, mode, s, ceilings)
                rows.append(row)
                print(
                    f"{heads:3} heads {mode:12} {batch:4} x {context:6}: {row.us:8.1f} us, floor {row.floor_us:7.1f} "
                    f"({row.floor_us / row.us:4.0%}) {row.target_us or '':>6} {row.met}",
                    flush=True,
                )
            del s
            torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"ceilings": ceilings, "rows": [asdict(row) for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
