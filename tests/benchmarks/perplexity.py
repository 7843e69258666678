"""Perplexity on held-out text: dense weights, AWQ, and AWQ with each low-bit cache.

    python -m tests.benchmarks.perplexity [--models smollm2 demo key-bias] [--tokens 20480]
        [--demo-twin FOLDER] [--demo-held FOLDER] [--json FILE]

The text of `smollm2` is the interpreter's own help. The demo model is measured on the token files kept out of its
training (a part of them is in the repository), beside its full-precision twin, which its training leaves and which is
not: without --demo-twin, dense is left out. `key-bias` is a synthetic qwen2 on what it says itself. Compute is float32
on the native kernels, so that a row differs from the one it is compared with in what it names alone. Ends with 1 if a
limit is missed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.cache_layout import cache_modes
from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.convert.import_gguf import import_gguf
from deepseek_tgi.convert.small_model import ensure_small_model, small_gguf
from deepseek_tgi.kv.layout import KVMode
from deepseek_tgi.text.tokenizer import TextTokenizer
from tests.benchmarks.measure import circumstances
from tests.held_out import DEMO_WINDOW, HELD, every_token, held_windows, loss_on, outside_turns, prose, windows
from tests.key_bias import own_text, write_checkpoint
from tests.tiny_tokenizer import write_tokenizer

MODELS = ("smollm2", "demo", "key-bias")
LIMITS = {KVMode.INT8: 0.001, KVMode.INT4: 0.01}
"""Largest relative change of perplexity that a cache may cost."""
LOW_BITS = (KVMode.INT8, KVMode.FP8, KVMode.INT4)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in one or both forms, with the tokens of text that it has not seen, in pieces without common context."""

    name: str
    dense: Path | None
    awq: Path | None
    pieces: Sequence[Sequence[int]]
    counts: Callable[[Sequence[int]], list[bool]] = every_token


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `change` is relative to the row it is held against: AWQ to dense, a cache to AWQ without."""

    model: str
    weights: str
    cache: str
    perplexity: float
    change: float | None
    limit: float | None
    tokens: int
    seconds: float

    @property
    def met(self) -> bool:
        """True unless a limit is missed."""
        return self.limit is None or self.change is None or abs(self.change) <= self.limit


def measure(subject: Subject) -> Iterator[Row]:
    """All rows of one model: each form over an exact cache, then the last form over the others."""
    forms = [(name, path) for name, path in (("dense", subject.dense), ("AWQ", subject.awq)) if path is not None]
    exact: Row | None = None
    for weights, folder in forms:
        exact = _row(subject, weights, _load(folder), KVMode.FLOAT32, against=exact)
        yield exact
    for mode in LOW_BITS:
        if mode in cache_modes(read_model_config(folder)):
            yield _row(subject, weights, _load(folder, mode), mode, against=exact)


def _load(folder: Path, mode: KVMode = KVMode.FLOAT32) -> QuantizedModelAdapter:
    """The model, made ready for a cache in `mode`: what a format needs to know of a model is found at load."""
    options = LoadOptions(dtype="float32", kernels="native", kv_cache_dtype=mode.value)
    return QuantizedModelAdapter.get_model(str(folder), options=options)


def _row(
    subject: Subject,
    weights: str,
    adapter: QuantizedModelAdapter,
    mode: KVMode,
    *,
    against: Row | None = None,
) -> Row:
    started = time.perf_counter()
    loss = loss_on(adapter, mode, subject.pieces, counts=subject.counts)
    change = None if against is None else loss.perplexity / against.perplexity - 1
    return Row(
        model=subject.name,
        weights=weights,
        cache=mode.value,
        perplexity=loss.perplexity,
        change=change,
        limit=LIMITS.get(mode),
        tokens=loss.num_tokens,
        seconds=time.perf_counter() - started,
    )


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as a table."""
    yield "| model | weights | cache | perplexity | change | limit |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        change = "" if row.change is None else f"{row.change:+.3%}"
        limit = "" if row.limit is None else f"{row.limit:.1%}{'' if row.met else ' MISSED'}"
        yield f"| {row.model} | {row.weights} | {row.cache} | {row.perplexity:.4f} | {change} | {limit} |"


@contextmanager
def smollm2(num_tokens: int, window: int) -> Iterator[Subject]:
    """The small real model: its own GGUF file unpacked to float16, and the AWQ checkpoint that is served."""
    with tempfile.TemporaryDirectory(prefix="perplexity-") as work:
        dense, awq = Path(work) / "dense", ensure_small_model()
        import_gguf(small_gguf(Path(work)), dense)
        ids = TextTokenizer.from_folder(awq).encode(prose(), add_special_tokens=False)
        yield Subject("SmolLM2-135M-Instruct", dense, awq, windows(ids[:num_tokens], window))


@contextmanager
def demo(twin: Path | None, held: Path, num_tokens: int) -> Iterator[Subject]:
    """The bundled model beside its full-precision twin, which is given the same tokenizer.

    As in its training, windows run over documents, and what a user says is not predicted.
    """
    awq = resolve_folder("demo")
    with tempfile.TemporaryDirectory(prefix="perplexity-") as work:
        own = [path for path in (twin.iterdir() if twin else ()) if path.is_file() and "tokenizer" not in path.name]
        for path in (*own, *awq.glob("tokenizer*")):
            (Path(work) / path.name).symlink_to(path.resolve())
        tokenizer = TextTokenizer.from_folder(awq)
        marks = [tokenizer.encode(mark, add_special_tokens=False)[0] for mark in ("<｜User｜>", "<｜Assistant｜>")]
        pieces = held_windows(held, DEMO_WINDOW, num_tokens)
        yield Subject("demo", Path(work) if twin else None, awq, pieces, outside_turns(*marks))


@contextmanager
def key_bias() -> Iterator[Subject]:
    """A synthetic qwen2 whose keys have a huge constant part, on text of its own."""
    with tempfile.TemporaryDirectory(prefix="perplexity-") as work:
        folder = write_checkpoint(Path(work) / "model")
        write_tokenizer(folder)
        yield Subject("qwen2 with a huge key bias", folder, None, own_text(_load(folder)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=20 * 1024)
    parser.add_argument("--window", type=int, default=1024, help="tokens that see each other, of smollm2")
    parser.add_argument("--demo-twin", type=Path, help="folder of the demo model in full precision")
    parser.add_argument("--demo-held", type=Path, default=HELD, help="folder of token files kept out of its training")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    rows: list[Row] = []
    if "smollm2" in options.models:
        with smollm2(options.tokens, options.window) as subject:
            rows += _told(measure(subject))
    if "demo" in options.models:
        with demo(options.demo_twin, options.demo_held, options.tokens) as subject:
            rows += _told(measure(subject))
    if "key-bias" in options.models:
        with key_bias() as subject:
            rows += _told(measure(subject))
    print(*markdown(rows), sep="\n")
    if options.json is not None:
        report = {**circumstances(), "window": options.window, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row.met for row in rows) else 1


def _told(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        print(f"{row.model}, {row.weights}, {row.cache}: {row.perplexity:.4f} in {row.seconds:.0f} s", flush=True)
        yield row


if __name__ == "__main__":
    raise SystemExit(main())
