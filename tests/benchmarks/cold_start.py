"""From the first command to the first answer, on a machine that has never run it: `quickstart` with an empty cache.

    python -m tests.benchmarks.cold_start [--rounds 3] [--busy] [--json FILE]

Each round empties a cache folder of its own, runs `deepseek-tgi quickstart --exit` (the bundled model, the kernels
compiled) and notes when the first word of the answer came; a second run finds the kernels made. Files that Python and
the system keep (byte code, page cache) are as the machine has them. CPU seconds are those of all processes, compiler
included: what is left to compare where something else runs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Samples, circumstances
from tests.benchmarks.quiet import Quiet
from tests.launched_server import free_port

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the command to the first word of the answer, and of the processors until its end."""

    first_answer_s: float
    cpu_s: float


def start(cache: Path) -> Start:
    """One run with what `cache` holds. Refuses an answer that is none."""
    command = [sys.executable, "-m", "deepseek_tgi.cli", "quickstart", "--exit", "--question", QUESTION]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEEPSEEK_TGI_")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, "--port", str(free_port())], stdout=subprocess.PIPE, env=environ | {"XDG_CACHE_HOME": str(cache)}
    )
    assert process.stdout is not None
    shown, first = b"", None
    while piece := os.read(process.stdout.fileno(), 4096):
        shown += piece
        if first is None and shown.partition(QUESTION.encode())[2].strip():
            first = time.monotonic() - began
    code = process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code or first is None or EXPECTED not in shown.decode():
        raise SystemExit(f"quickstart ended with {code}: {shown.decode(errors='replace')}")
    return Start(first, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(rounds: int, quiet: Quiet) -> dict[str, Any]:
    """Figures of cold and of warm starts."""
    starts: dict[str, list[Start]] = {"nothing made": [], "kernels made": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:

            def cold_and_warm(folder: str = folder) -> tuple[Start, Start]:
                with tempfile.TemporaryDirectory(dir=folder) as cache:
                    return start(Path(cache)), start(Path(cache))

            cold, warm = quiet.run(cold_and_warm)
        starts["nothing made"].append(cold)
        starts["kernels made"].append(warm)
    return {
        name: {
            "first_answer_s": Samples(tuple(round(one.first_answer_s, 2) for one in runs)).to_json(),
            "cpu_s": Samples(tuple(round(one.cpu_s, 2) for one in runs)).to_json(),
        }
        for name, runs in starts.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; with `--json`, write too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="measure although something else uses the machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    given = list(sys.argv[1:] if argv is None else argv)
    report = {
        **circumstances(),
        "command": shlex.join(["python", "-m", "tests.benchmarks.cold_start", *given]),
        "starts": measure(options.rounds, Quiet(not options.busy)),
        "load_average_after": os.getloadavg()[0],
    }
    print(json.dumps(report, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
