"""All GPU benchmarks in one call, each in a process of its own; figures as printed, and as JSON in a folder.

    python -m tests.benchmarks.gpu [--parts gemm attention latent moe whole_model load peers ranks] [--out DIR] [--full]

Each part measures its ceilings and its peers itself, in its own process, right before what is compared with them.
Without `--full` whole models are measured at the contexts and caches that have targets; `ranks` wants two GPUs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark: its module beside this file, how it takes the path of its JSON, and its usual arguments."""

    module: str
    flag: str | None = "--json"
    usual: tuple[str, ...] = ()
    gpus: int = 1

    def command(self, out: Path | None, full: bool) -> list[str]:
        """What to run."""
        path = [] if out is None else [*([self.flag] if self.flag else []), str(out / f"{self.module}.json")]
        own = () if full else self.usual
        return [sys.executable, "-m", f"{__package__}.{self.module}", *own, *path]


PARTS = (
    Part("gemm"),
    Part("attention", flag=None),
    Part("latent", flag=None),
    Part("moe"),
    Part(
        "whole_model",
        usual=(
            *("--cache", "int8", "--batches", "1", "16", "32", "--contexts", "1024", "8192"),
            *("--prompts", "512", "4096", "--rpc"),
        ),
    ),
    Part("load"),
    Part("peers"),
    Part("ranks", gpus=2),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one of them failed."""
    names = [part.module for part in PARTS]
    there = [part.module for part in PARTS if part.gpus <= torch.cuda.device_count()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=names, default=there)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a part may take")
    args = parser.parse_args(argv)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in PARTS:
        if part.module in args.parts:
            print(f"== {part.module}", flush=True)
            started = time.perf_counter()
            try:
                status = subprocess.run(part.command(args.out, args.full), timeout=args.limit, check=False).returncode
            except subprocess.TimeoutExpired:
                status = -1
            print(f"-- {part.module}: {time.perf_counter() - started:.0f} s, status {status}", flush=True)
            failed += [part.module] if status else []
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
