"""Serving on a CPU beside llama.cpp: the same model at 4 bits, the same prompts, the same threads, in one run.

    python -m tests.peers --with llama
    python -m tests.benchmarks.cpu_serving --json tests/benchmarks/results/NAME.json

Batch-1 decode and prefill are measured inside one process a side, through our engine and through llama.cpp's C API.
Sixteen streams are measured through HTTP: our launcher and router against `llama_cpp.server`, which holds a lock and
serves one stream at a time. llama.cpp's own batched decoding of the sixteen, with no server at all, is shown beside it
as the best a parallel llama.cpp server could do. Nothing is timed if a side answers nonsense or the machine is busy.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import http_load, report, servers
from tests.benchmarks.measure import Samples, circumstances, read_bandwidth_bytes_per_s
from tests.benchmarks.prompts import ANSWER, LONG_TOKENS, PROBE, FreshTexts, Prompts, make_prompts
from tests.benchmarks.quiet import Quiet
from tests.benchmarks.report import OURS, Figures
from tests.benchmarks.workers import Worker
from tests.peers import PEERS

HERE = Path(__file__).resolve().parent
NEW_TOKENS, STREAM_TOKENS = 64, 64


@dataclass(frozen=True, slots=True)
class Sides:
    """What is compared: our folder, and llama.cpp's files by the name they are shown under."""

    ours: Path
    llama_python: str
    files: dict[str, Path]

    def workers(self, stack: ExitStack) -> list[Worker]:
        """One process a side, ours first; closed with `stack`."""
        llama = [self.llama_python, str(HERE / "llama_worker.py")]
        argvs = {OURS: [sys.executable, "-m", "tests.benchmarks.our_worker", str(self.ours)]}
        argvs |= {name: [*llama, str(file)] for name, file in self.files.items()}
        return [stack.enter_context(Worker(name, argv)) for name, argv in argvs.items()]


def refuse_nonsense(workers: Sequence[Worker], prompts: Prompts) -> None:
    """The speed of a wrong answer is no figure."""
    for worker in workers:
        text = worker.generate(prompts.probe, 12)["text"]
        if ANSWER not in text:
            raise SystemExit(f"{worker.name} answers {text!r} to {PROBE!r}, expected {ANSWER!r}: nothing is timed")
        print(f"{worker.name} answers {text!r}", flush=True)


def in_turn(workers: Sequence[Worker], repeats: int) -> Iterator[tuple[bool, Worker]]:
    """Workers in alternating order; the first round warms up and does not count."""
    for repeat in range(repeats + 1):
        for worker in workers if repeat % 2 else reversed(workers):
            yield repeat > 0, worker


def measure_steps(workers: Sequence[Worker], prompts: Prompts, repeats: int, figures: Figures, quiet: Quiet) -> None:
    """Everything that needs no server."""
    for counts, worker in in_turn(workers, repeats):
        short = quiet.run(partial(worker.generate, prompts.short, NEW_TOKENS))
        long = quiet.run(partial(worker.generate, prompts.long, NEW_TOKENS))
        many = quiet.run(partial(worker.batched, prompts.streams, STREAM_TOKENS))
        if counts:
            figures.add(report.SHORT, worker.name, NEW_TOKENS / short["decode_s"])
            figures.add(report.LONG, worker.name, NEW_TOKENS / long["decode_s"])
            figures.add(report.PREFILL, worker.name, LONG_TOKENS / long["prefill_s"])
            figures.add(report.BATCHED, worker.name, many["tokens"] / many["total_s"])


def measure_http(
    sides: Sides, texts: FreshTexts, count: Callable[[str], int], repeats: int, figures: Figures, quiet: Quiet
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sixteen streams a round, both servers up, one loaded at a time: peak memory and waits for the first text."""
    name, gguf = next(iter(sides.files.items()))
    waits: dict[str, list[float]] = {}
    with servers.our_server(sides.ours) as mine, servers.llama_server(sides.llama_python, gguf) as theirs:
        for repeat in range(repeats + 1):
            for side, server in ((OURS, mine), (f"{name}, its server", theirs)):
                load = quiet.run(partial(_one_round, server.url, texts))
                if repeat:
                    figures.add(report.HTTP, side, load.tokens_per_s(count))
                    waits.setdefault(side, []).append(load.first_text_s())
        memory = {OURS: mine.peak_memory_bytes(), name: theirs.peak_memory_bytes()}
    return memory, {side: Samples(tuple(values)).to_json() for side, values in waits.items()}


def _one_round(url: str, texts: FreshTexts) -> http_load.Load:
    return http_load.run_streams(url, texts.draw(), STREAM_TOKENS)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.cpu_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--llama-python", default=str(PEERS["llama"].python), help="Python that has llama-cpp-python")
    parser.add_argument("--model", default="smollm2", help="smollm2, or an AWQ folder (then give --gguf)")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (one more warms up)")
    parser.add_argument("--no-http", action="store_true", help="leave the servers out")
    parser.add_argument("--no-requantised", action="store_true", help="only the GGUF as it is, no Q4_K_M copy of it")
    parser.add_argument("--busy", action="store_true", help="measure although the machine is busy with something else")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    return parser.parse_args(argv)


def choose_sides(arguments: argparse.Namespace, scratch: Path) -> Sides:
    """Find or make the checkpoints of both sides."""
    if not Path(arguments.llama_python).exists():
        raise SystemExit(f"{arguments.llama_python} is not there: python -m tests.peers --with llama")
    gguf: Path | None = arguments.gguf
    if arguments.model == "smollm2":
        from deepseek_tgi.convert.small_model import ensure_small_model, small_gguf

        ours, gguf = ensure_small_model(), gguf or small_gguf(scratch)
    elif gguf is None:
        raise SystemExit("--gguf: expected the same model as a GGUF file, since --model is not smollm2")
    else:
        ours = Path(arguments.model)
    files = {f"llama.cpp {gguf.stem.rpartition('.')[2] or gguf.stem}": gguf}
    if not arguments.no_requantised:
        copy = scratch / "model.Q4_K_M.gguf"
        worker = str(HERE / "llama_worker.py")
        subprocess.run([arguments.llama_python, worker, str(gguf), "--requantise-to", str(copy)], check=True)
        files["llama.cpp Q4_K_M"] = copy
    return Sides(ours, arguments.llama_python, files)


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and print the report; 0 whether or not the targets are met."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse(words)
    from deepseek_tgi.text.tokenizer import TextTokenizer

    facts = circumstances() | {"command": shlex.join(["python", "-m", "tests.benchmarks.cpu_serving", *words])}
    figures, quiet = Figures(), Quiet(required=not arguments.busy)
    with ExitStack() as stack:
        sides = choose_sides(arguments, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))))
        tokenizer = TextTokenizer.from_folder(sides.ours)
        prompts = make_prompts(tokenizer)
        bandwidth = quiet.run(read_bandwidth_bytes_per_s)
        with ExitStack() as loaded:
            workers = sides.workers(loaded)
            refuse_nonsense(workers, prompts)
            measure_steps(workers, prompts, arguments.repeats, figures, quiet)
            memory: dict[str, Any] = {"worker": {w.name: w.peak_memory_bytes() for w in workers}, "http": {}}
            abouts = {worker.name: worker.about for worker in workers}
        waits: dict[str, Any] = {}
        if not arguments.no_http:
            texts = FreshTexts(tokenizer, prompts)
            memory["http"], waits = measure_http(
                sides, texts, lambda text: len(tokenizer.encode(text, False)), arguments.repeats, figures, quiet
            )
    facts |= {"model": sides.ours.name, "gguf": ", ".join(file.name for file in sides.files.values())}
    facts |= {"repeats": arguments.repeats, "sides": abouts, "peak_memory_bytes": memory, "first_text_s": waits}
    ceilings = {side: bandwidth / about["weight_bytes"] for side, about in abouts.items()}
    facts["discarded_as_disturbed"] = quiet.discarded
    facts["floor"] = {"read_bytes_per_s": bandwidth, "ceiling_tokens_per_s": ceilings}
    report.print_report(figures, facts)
    if arguments.json:
        arguments.json.write_text(json.dumps(facts | {"figures": figures.to_json()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
