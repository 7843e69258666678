"""All GPU benchmarks in one call, each in a process of its own; figures as printed, and as JSON in a folder.

    python -m tests.benchmarks.gpu [--parts gemm attention latent moe whole_model load peers ranks] [--out DIR] [--full]

Each part measures its ceilings and its peers itself, in its own process, right before what is compared with them.
Without `--full` whole models are measured at the contexts and caches that have targets. A part that wants more GPUs
than there are (`ranks`: two) is named and left out; where it was asked for, or nothing else runs, that is a failure.
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
    """Run the parts; 1 if one of them failed, or one that is wanted cannot run here."""
    names = [part.module for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=names)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a part may take")
    args = parser.parse_args(argv)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    wanted = [part for part in PARTS if part.module in (args.parts or names)]
    there, failed, left_out = torch.cuda.device_count(), [], []
    for part in wanted:
        print(f"== {part.module}", flush=True)
        if part.gpus > there:
            print(f"needs {part.gpus} GPU{'s' * (part.gpus > 1)}, torch {torch.__version__} sees {there}", flush=True)
            left_out.append(part.module)
        elif not _succeeds(part.command(args.out, args.full), part.module, args.limit):
            failed.append(part.module)
    for what, parts in (("failed", failed), ("not run", left_out)):
        if parts:
            print(f"{what}: {', '.join(parts)}")
    return 1 if failed or (left_out and args.parts) or len(left_out) == len(wanted) else 0


def _succeeds(command: list[str], name: str, limit_s: float) -> bool:
    """Run a part and say how long it took."""
    started = time.perf_counter()
    try:
        status = subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        status = -1
    print(f"-- {name}: {time.perf_counter() - started:.0f} s, status {status}", flush=True)
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
