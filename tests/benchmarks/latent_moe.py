"""DeepSeek-V2-Lite's two kinds of layer on the CPU in one run: chosen experts beside all of them, latents beside heads.

    python -m tests.benchmarks.latent_moe [--context 4096] [--requests 1 8] [--tokens 1 4 16 64 256] [--json FILE]

What each half measures and how is told by `moe_cpu` and `latent_cpu`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import latent_cpu, moe_cpu
from tests.benchmarks.measure import circumstances
from tests.benchmarks.quiet import Quiet


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(moe_cpu.TOKENS), help="of a step, for experts")
    parser.add_argument("--requests", type=int, nargs="+", default=list(latent_cpu.REQUESTS), help="that decode")
    parser.add_argument("--context", type=int, default=latent_cpu.CONTEXT, help="tokens they see, a multiple of 16")
    parser.add_argument("--threads", type=int, default=0, help="0: all this process may use")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="measure although the machine is busy with something else")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    options = parser.parse_args(words)
    report = circumstances() | {"command": shlex.join(["python", "-m", "tests.benchmarks.latent_moe", *words])}
    quiet = Quiet(required=not options.busy)
    report["experts"] = moe_cpu.measure(
        tokens=options.tokens, threads=options.threads, repeats=options.repeats, quiet=quiet
    )
    report["latents"] = latent_cpu.measure(
        requests=options.requests,
        context=options.context,
        threads=options.threads,
        repeats=options.repeats,
        quiet=quiet,
    )
    print(f"{report['cpu']}, {report['threads']} threads, commit {report['commit']}, {report['date']}")
    moe_cpu.print_report(report["experts"])
    print()
    latent_cpu.print_report(report["latents"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
