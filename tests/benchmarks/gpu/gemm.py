"""INT4 products in the shapes of R1-Distill-Llama-8B and -Qwen-7B, against floor, cuBLAS and torch's own INT4 operator.

    python -m tests.benchmarks.gpu.gemm [--json FILE] [--rows 1,8,16] [--weights gate_up,o]

The floor is the larger of the weight's bytes over the bandwidth of reading and the operations over cuBLAS's best rate,
both measured in the same run. A product is timed only after it agreed with float64, in turns with dequantising first
and with cuBLAS. `target` is the better of vLLM's
Marlin and Machete on an H200, less the gain asked for, or the time of cuBLAS; what is to be beaten is measured here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from deepseek_tgi.kernels.cuda.machine import Machine, machine_of
from deepseek_tgi.kernels.cuda.nvrtc import arch_of, compile_all
from deepseek_tgi.kernels.int4_linear import dequantised, layout
from deepseek_tgi.kernels.int4_linear.choice import Choice, Chooser, tables_for
from deepseek_tgi.kernels.int4_linear.cuda import Int4Ops
from deepseek_tgi.kernels.int4_linear.layout import CudaInt4
from deepseek_tgi.kernels.int4_linear.tune import graph_times, spec_of
from tests.benchmarks.gpu.timing import REPLAYS, graph_us
from tests.benchmarks.measure import circumstances

WEIGHTS = {
    "llama qkv": (6144, 4096),
    "llama o": (4096, 4096),
    "llama gate_up": (28672, 4096),
    "llama down": (4096, 14336),
    "qwen gate_up": (37888, 3584),
}
ROWS = (1, 8, 16, 32, 64, 256, 1024, 4096)
GROUP = 128
ROTATED_BYTES = 320_000_000
MAX_ERROR = 4e-3
"""Of bfloat16 results against float64, as a share of the norm: rounding the result alone makes 1.7e-3."""

PEERS_US = {
    ("llama qkv", 1): 10.6, ("llama qkv", 16): 11.8, ("llama qkv", 64): 22.0, ("llama qkv", 256): 27.5,
    ("llama o", 1): 9.0, ("llama o", 16): 9.1, ("llama o", 64): 15.6, ("llama o", 256): 22.2,
    ("llama gate_up", 1): 29.6, ("llama gate_up", 16): 28.7, ("llama gate_up", 64): 42.2,
    ("llama gate_up", 256): 91.1, ("llama gate_up", 4096): 1479,
    ("llama down", 1): 21.5, ("llama down", 16): 21.1, ("llama down", 64): 28.3, ("llama down", 256): 57.2,
    ("llama down", 4096): 893,
    ("qwen gate_up", 1): 37.1, ("qwen gate_up", 16): 34.1, ("qwen gate_up", 64): 47.9, ("qwen gate_up", 256): 103,
    ("qwen gate_up", 4096): 1678,
}  # fmt: skip
"""The better of vLLM 0.26's Marlin (with zero points) and Machete (symmetric) on an H200."""
FEW_ROWS_US = {"llama gate_up": 18.0, "llama down": 9.5, "llama qkv": 5.0, "llama o": 4.0}


@dataclass(frozen=True, slots=True)
class Row:
    """One weight by one number of rows, in microseconds; None where a peer cannot run or has no figure."""

    weight: str
    rows: int
    us: float
    floor_us: float
    dequantise_us: float
    cublas_us: float
    torch_int4_us: float | None
    peer_us: float | None
    target_us: float
    error: float
    choice: str

    @property
    def met(self) -> str:
        """Whether the target was met, in a word."""
        return "met" if self.us <= self.target_us else "missed"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and save with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=ROWS)
    parser.add_argument("--weights", type=lambda text: text.split(","), default=list(WEIGHTS))
    parser.add_argument("--json", type=Path, dest="out")
    args = parser.parse_args(argv)
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    machine = machine_of(device)
    ops = Int4Ops(machine, Chooser(tables_for(device), machine.multiprocessors, machine.capability))
    ceilings = {"read_bytes_per_s": read_bytes_per_s(), "bf16_flops": bf16_flops()}
    print(f"{torch.cuda.get_device_name(device)}: read {ceilings['read_bytes_per_s'] / 1e12:.2f} TB/s, ", end="")
    print(f"bfloat16 product {ceilings['bf16_flops'] / 1e12:.0f} TFLOP/s")
    print("weight            rows      us   floor  of floor   cuBLAS  dequant  torch4     peer   target")
    outlines = [outline(*WEIGHTS[name]) for name in args.weights]
    choices = [(ops.chooser.choice(w, m), w, m) for w in outlines for m in args.rows]
    wanted = [spec_of(*each) for each in (*choices, (None, outlines[0], 1))]
    compile_all(wanted, arch_of(*torch.cuda.get_device_capability(device)))
    rows = []
    for name in args.weights:
        for row in measured(ops, name, args.rows, ceilings):
            rows.append(row)
            print_row(row)
    if args.out:
        content = {"circumstances": circumstances(), "ceilings": ceilings, "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(content, indent=1))


def measured(ops: Int4Ops, name: str, all_rows: Sequence[int], ceilings: dict[str, float]) -> list[Row]:
    """All numbers of rows of one weight."""
    n, k = WEIGHTS[name]
    device = torch.device("cuda:0")
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 16, (n, k // GROUP), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // GROUP, device=device) * 0.01 + 0.005).half()
    packed = layout.pack(codes, zeros, scales, GROUP)
    exact = (codes.view(n, -1, GROUP).double() - zeros.unsqueeze(-1)) * scales.double().unsqueeze(-1)
    copies = rotated(packed, lambda: CudaInt4(packed.codes.clone(), packed.metas.clone(), (n, k, GROUP), 1))
    dense = rotated(exact.view(n, k).to(torch.bfloat16), lambda: exact.view(n, k).to(torch.bfloat16))
    theirs = torch_int4(codes)
    rows = []
    for m in all_rows:
        x, out = torch.randn(m, k, device=device).bfloat16(), torch.empty(m, n, device=device, dtype=torch.bfloat16)
        floor = max(packed.nbytes / ceilings["read_bytes_per_s"], 2 * m * n * k / ceilings["bf16_flops"]) * 1e6
        out.fill_(float("nan"))
        ops.int4_linear(x, packed, out=out)
        some = slice(max(0, m - 256), m)
        expected = x[some].double() @ exact.view(n, k).t()
        error = float((out[some].double() - expected).norm() / expected.norm())
        assert error < MAX_ERROR, f"{name}, {m} rows: wrong by {error:.1e}"
        calls = max(1, min(len(copies), 4096 // m))
        us, dequantise, cublas = graph_times(
            [
                [partial(ops.int4_linear, x, w, out=out) for w in copies[:calls]],
                [partial(dequantise_first, ops.machine, x, w, out) for w in copies[: min(calls, 4)]],
                [partial(torch.mm, x, w.t(), out=out) for w in dense[: max(2, calls)]],
            ],
            REPLAYS,
        )
        peer = PEERS_US.get((name, m))
        rows.append(
            Row(
                name,
                m,
                us,
                floor,
                dequantise,
                cublas,
                graph_us([partial(theirs, x)] * 4, 5) if theirs is not None and m <= 64 else None,
                peer,
                target_us(name, m, cublas, peer),
                error,
                words(ops.chooser.choice(packed, m)),
            )
        )
    return rows


def outline(n: int, k: int) -> CudaInt4:
    """A weight without numbers, to ask what would multiply it."""
    tiles = -(-n // layout.UNIT_ROWS) * (layout.UNIT_ROWS // layout.TILE_ROWS)
    codes = torch.empty(tiles, k // layout.CHUNK, 32, 4, dtype=torch.int32, device="meta")
    metas = torch.empty(tiles, k // GROUP, 8, 2, 1, dtype=torch.int32, device="meta")
    return CudaInt4(codes, metas, (n, k, GROUP), 1)


def target_us(name: str, rows: int, cublas_us: float, peer_us: float | None) -> float:
    """What is asked for: figures of the design up to 8 rows, gains over peers up to 32, then cuBLAS."""
    if rows <= 8 and name in FEW_ROWS_US:
        return FEW_ROWS_US[name]
    if peer_us is not None and rows <= 32:
        return peer_us / (1.6 if rows <= 8 else 1.3)
    if rows <= 64:
        return cublas_us / 1.5
    return cublas_us if rows <= 256 else cublas_us * 1.1


def dequantise_first(machine: Machine, x: torch.Tensor, w: CudaInt4, out: torch.Tensor) -> None:
    """The simplest way, which no kernel may be slower than."""
    dequantised.write(machine.programs, x, w, out)


def torch_int4(codes: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """torch's own INT4 product of a weight of these codes; None where it cannot be had."""
    n, k = codes.shape
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    except (RuntimeError, NotImplementedError):
        return None
    pairs = torch.rand(k // GROUP, n, 2, device=codes.device).bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, pairs)


def rotated(first: CudaInt4 | torch.Tensor, another: Callable[[], object]) -> list:  # type: ignore[type-arg]
    """The weight and so many others that reading all of them in turn reads memory, not a cache."""
    return [first, *(another() for _ in range(max(2, -(-ROTATED_BYTES // first.nbytes)) - 1))]


def words(choice: Choice) -> str:
    """A choice in a few words."""
    return "dequantise" if choice is None else repr(choice)


def read_bytes_per_s() -> float:
    """What reading large memory comes to."""
    big = torch.empty(1 << 29, dtype=torch.int32, device="cuda").fill_(3)
    return big.nbytes / (graph_us([big.amax] * 3) * 1e-6)


def bf16_flops() -> float:
    """cuBLAS's rate on a large product."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    return 2 * 8192**3 / (graph_us([partial(torch.mm, a, a)] * 4) * 1e-6)


def print_row(row: Row) -> None:
    """One line of the table."""
    torch4 = "-" if row.torch_int4_us is None else f"{row.torch_int4_us:.1f}"
    peer = "-" if row.peer_us is None else f"{row.peer_us:.1f}"
    print(
        f"{row.weight:16s} {row.rows:5d} {row.us:7.1f} {row.floor_us:7.1f} {row.floor_us / row.us:9.2f}"
        f" {row.cublas_us:8.1f} {row.dequantise_us:8.1f} {torch4:>7s} {peer:>8s} {row.target_us:8.1f} {row.met}",
        flush=True,
    )


if __name__ == "__main__":
    main()
