"""A plan as lines for people and as an object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from deepseek_tgi.adapters.plan import PlanLine, ranges_of
from deepseek_tgi.launcher.plan import GIB, ModelPlan

_NAME_WIDTH = 20


def plan_object(plan: ModelPlan) -> dict[str, Any]:
    """The plan for `json`; sizes are bytes and counts are whole numbers."""
    return asdict(plan)


def plan_lines(plan: ModelPlan) -> Iterator[str]:
    """The plan for people, line by line."""
    yield from _facts(plan)
    yield ""
    yield from _modules(plan)
    yield ""
    yield from _weights(plan)
    yield ""
    yield from _caches(plan)
    yield ""
    yield from _tgi(plan)


def _facts(plan: ModelPlan) -> Iterator[str]:
    yield _fact("model", plan.folder)
    stored = f"{plan.weights.parameters:,} parameters in {size_text(plan.weights.stored_bytes)}"
    yield _fact("type", f"{plan.model_type}, {plan.num_layers} layers, {stored}")
    files = f"the headers of {size_text(plan.file_bytes)} of .safetensors files"
    yield _fact("read from", files if plan.file_bytes else "config.json alone: there is no .safetensors file")
    for note in plan.notes:
        yield _fact("note", note)


def _modules(plan: ModelPlan) -> Iterator[str]:
    ranks = "1 rank" if plan.num_shard == 1 else f"{plan.num_shard} ranks"
    rows = [("module", "shape", "stored as", f"split over {ranks}", "bytes")]
    rows += [
        (line.name, str(list(line.shape)), line.form, _split(line), f"{line.stored_bytes:,}")
        for line in plan.weights.lines
    ]
    yield from _table(rows, right=(4,))


def _weights(plan: ModelPlan) -> Iterator[str]:
    rows = [("weights", "as stored", f"in memory ({plan.kernels} kernels, {plan.compute_dtype})")]
    ranks = plan.weights.ranks
    for rank, run in groupby(range(len(ranks)), lambda number: ranks[number]):
        numbers = list(run)
        name = f"rank {numbers[0]}" if len(numbers) == 1 else f"each of ranks {ranges_of(numbers)}"
        rows.append((name, size_text(rank.stored_bytes), size_text(rank.held_bytes)))
    if len(ranks) > 1:
        stored, held = (sum(getattr(rank, name) for rank in ranks) for name in ("stored_bytes", "held_bytes"))
        rows.append(("all ranks", size_text(stored), size_text(held)))
    yield from _table(rows)


def _caches(plan: ModelPlan) -> Iterator[str]:
    here = f"tokens here ({size_text(plan.available_bytes)} free)"
    rows = [("KV cache of a rank", "bytes a token", "TGI's / ours", "tokens in 1 GiB", here)]
    for cache in plan.caches:
        name = f"{cache.mode} (in use)" if cache.in_use else cache.mode
        ratio = plan.tgi.bytes_per_token / plan.num_shard / cache.bytes_per_token
        numbers = (cache.bytes_per_token, cache.tokens_per_gib, cache.tokens_here)
        own, per_gib, tokens = (f"{number:,}" for number in numbers)
        rows.append((name, own, f"{ratio:.1f}", per_gib, tokens))
    yield from _table(rows, right=(1, 2, 3, 4))
    for why in dict.fromkeys(cache.why for cache in plan.caches if cache.why and cache.in_use):
        yield _fact("does not fit here", why)


def _tgi(plan: ModelPlan) -> Iterator[str]:
    tgi = plan.tgi
    yield _fact(
        "TGI, in 16 bits",
        f"weights {size_text(tgi.weight_bytes)}; KV {tgi.bytes_per_token:,} bytes a token on all ranks together, "
        f"{GIB // tgi.bytes_per_token:,} tokens in 1 GiB",
    )


def _split(line: PlanLine) -> str:
    if not line.parts:
        return line.split
    runs = [(len(list(run)), width) for width, run in groupby(line.parts)]
    return f"{line.split}: " + " + ".join(str(width) if count == 1 else f"{count} x {width}" for count, width in runs)


def size_text(size: int) -> str:
    """`31,412,968,448 bytes (29.26 GiB)`."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size:,} bytes ({size / scale:.2f} {unit})"
    return f"{size:,} bytes"


def _fact(name: str, value: str) -> str:
    return f"{name:<{_NAME_WIDTH}}{value}"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Rows of equal length with their columns under one another; columns of `right` are flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()
