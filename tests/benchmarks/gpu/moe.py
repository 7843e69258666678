"""One mixture-of-experts layer of DeepSeek-V2-Lite on a GPU, INT4, from one token to 4,096.

    python -m tests.benchmarks.gpu.moe [--json FILE]

Compared with float32 arithmetic first, then timed in a CUDA graph over as many copies of the layer as the L2 cache
cannot hold. The floor is the larger of the chosen experts' bytes at the copy rate measured here and of their arithmetic
at the rate of a large bfloat16 product measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.moe import Expert
from deepseek_tgi.kernels.moe.cuda import CudaMoe
from deepseek_tgi.kernels.moe.cuda_experts import CudaExperts
from tests.benchmarks.gpu.timing import copy_bytes_per_s, graph_us

HIDDEN, INNER, SHARED, EXPERTS, TOP = 2048, 1408, 2 * 1408, 64, 6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
COPIES = 3


class Random(PackedInt4):
    """A random INT4 weight on the device."""

    def __init__(self, rows: int, columns: int, size: int = 128) -> None:
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device="cuda")
        zeros = torch.randint(6, 10, (rows, columns // size), dtype=torch.uint8, device="cuda")
        scales = ((torch.rand(rows, columns // size, device="cuda") + 0.5) * 0.2 / columns**0.5).half()
        self.own = Int4Tensors(codes, zeros, scales, size)
        super().__init__(rows, columns, size, rows * columns // 2 + rows * columns // size * 4)

    def tensors(self) -> Int4Tensors:
        """As it was stored."""
        return self.own

    def dequantise(self) -> torch.Tensor:
        """See `PackedInt4`."""
        own = self.own
        groups = own.codes.view(self.out_features, -1, self.group_size).float() - own.zeros.float().unsqueeze(-1)
        return (groups * own.scales.float().unsqueeze(-1)).view(self.out_features, -1)


def layer() -> tuple[CudaExperts, list[Expert]]:
    """A layer, packed, and its experts, the shared one last."""
    everyone = [Expert(Random(2 * i, HIDDEN), Random(HIDDEN, i)) for i in [INNER] * EXPERTS + [SHARED]]
    return CudaExperts(everyone[:-1], everyone[-1]), everyone


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, everyone: list[Expert]) -> torch.Tensor:
    """What the layer adds, in float32."""
    out = torch.zeros(len(x), HIDDEN, device="cuda")
    for index, expert in enumerate(everyone):
        shares = (weights * (ids == index)).sum(1) if index < EXPERTS else torch.ones(len(x), device="cuda")
        rows = shares.nonzero().squeeze(1)
        gate, up = (x[rows].float() @ expert.gate_up.dequantise().t()).chunk(2, 1)  # type: ignore[union-attr]
        inner = torch.nn.functional.silu(gate) * up
        out[rows] += shares[rows, None] * (inner @ expert.down.dequantise().t())  # type: ignore[union-attr]
    return out


def product_flops_per_s() -> float:
    """Rate of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (graph_us([lambda: a @ b] * 4) * 1e-6)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    bandwidth, rate = copy_bytes_per_s(), product_flops_per_s()
    op = CudaMoe(machine_of(torch.device("cuda:0")))
    made = [layer() for _ in range(COPIES)]
    one = made[0][0].nbytes / (EXPERTS + 2)
    rows: list[dict[str, Any]] = []
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        calls, worst, touched = [], 0.0, 0.0
        for turn, (experts, everyone) in enumerate(made * (4 if tokens <= 64 else 1)):
            ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOP].int().contiguous()
            weights = torch.rand(tokens, TOP, device="cuda")
            out = torch.zeros(tokens, HIDDEN, device="cuda")
            if turn == 0:
                op(x, ids, weights, experts, out)
                wanted = expected(x, ids, weights, everyone)
                worst = float((out - wanted).norm() / wanted.norm())
                assert worst < 1e-2, (tokens, worst)
                again = torch.zeros_like(out)
                op(x, ids, weights, experts, again)
                assert torch.equal(out, again), "two runs differ"
            touched += (len(set(ids.flatten().tolist())) + 2) * one
            calls.append(partial(op, x, ids, weights, experts, out))
        us = graph_us(calls)
        arithmetic = tokens * (TOP + 2) * 3 * 2 * HIDDEN * INNER
        floor = max(touched / len(calls) / bandwidth, arithmetic / rate) * 1e6
        rows.append({"tokens": tokens, "us": us, "floor_us": floor, "error": worst})
        sys.stdout.write(
            f"{tokens:5d} tokens  {us:8.1f} us  floor {floor:7.1f}  {floor / us:4.0%}  error {worst:.1e}\n"
        )
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"bandwidth": bandwidth, "rate": rate, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
