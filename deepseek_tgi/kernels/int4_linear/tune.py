"""Measures which kernel multiplies a weight fastest by how many rows, on the GPU it is asked on.

A measurement is a CUDA graph of calls over copies of the weight that together exceed every cache. Rivals are replayed
in turns, since a GPU that has just worked hard is slower for all, and the median counts. A kernel whose result is not
what dequantising gives is never chosen, and is reported.
"""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.machine import Machine, machine_of
from deepseek_tgi.kernels.cuda.nvrtc import arch_of, compile_all
from deepseek_tgi.kernels.cuda.program import KernelSpec
from deepseek_tgi.kernels.int4_linear import dequantised, layout, panel, stream, wide
from deepseek_tgi.kernels.int4_linear.choice import ROWS, Choice, key_of, read_table, runs, user_table, write_table
from deepseek_tgi.kernels.int4_linear.layout import CudaInt4
from deepseek_tgi.kernels.int4_linear.panel import PanelShape
from deepseek_tgi.kernels.int4_linear.stream import StreamCall, StreamShape
from deepseek_tgi.kernels.int4_linear.wide import WideShape

logger = logging.getLogger(__name__)

_CACHES_BYTES = 300_000_000
_MAX_COPIES = 64
_MANY_ROWS = 4096
_REPLAYS = 9
_MAX_ERROR = 1e-2
"""Of bfloat16 results: rounding alone makes 3e-3 of the norm."""


@dataclass(frozen=True, slots=True, order=True)
class Wanted:
    """A weight's shape."""

    out_features: int
    in_features: int
    group_size: int


def parse(text: str) -> Wanted:
    """`28672x4096` or `28672x4096g64`. Raises `ConfigError`."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:g([1-9]\d*))?", text)
    if found is None:
        raise ConfigError(f"weight: got {text!r}, expected outputs x inputs, as 28672x4096 or 28672x4096g64")
    n, k, group = int(found[1]), int(found[2]), int(found[3] or 128)
    if k % group or layout.kernel_group(group) is None:
        raise ConfigError(f"weight {text}: no kernel for groups of {group} along {k} inputs")
    return Wanted(n, k, group)


def parse_rows(text: str | None) -> tuple[int, ...]:
    """`1,8,64`; None means all that a table holds. Raises `ConfigError`."""
    if text is None:
        return ROWS
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) in ROWS for part in parts):
        raise ConfigError(f"rows: got {text!r}, expected some of {','.join(map(str, ROWS))}")
    return tuple(sorted({int(part) for part in parts}))


def run(
    where: torch.device, shapes: Sequence[Wanted], rows: Sequence[int], out: Path | None, *, progress: bool
) -> tuple[Path, list[str]]:
    """Measure every shape and write the table, adding to what it holds; its path, and a line for each shape.

    Raises `ConfigError` where that is no GPU or its kernels cannot be had, `ResourceError` for a table that cannot be
    written, before anything is measured.
    """
    from tqdm import tqdm

    if where.type != "cuda":
        raise ConfigError(f"tune: got device {where}, expected an NVIDIA GPU that torch can use")
    try:
        machine = machine_of(where)
    except BuildError as error:
        raise ConfigError(f"tune: {error}") from error
    arch = arch_of(*torch.cuda.get_device_capability(where))
    path = out or user_table(where)
    old = read_table(path)
    weights: dict[str, dict[int, Choice]] = {key: dict(steps) for key, steps in (old.weights if old else {}).items()}
    write_table(path, weights, about(where))
    lines = []
    with torch.cuda.device(where), tqdm(total=len(shapes) * len(rows), disable=not progress, unit="size") as bar:
        for wanted in shapes:
            copies = copies_of(random_weight(wanted, where))
            key = key_of(copies[0])
            bar.set_description(key)
            compile_all((each for count in rows for each in specs(copies[0], count, machine)), arch)
            times = []
            for count in rows:
                choice, time = best(machine, copies, count)
                weights.setdefault(key, {})[count] = choice
                times.append(f"{count}: {time:.1f}")
                write_table(path, weights, about(where))  # what was measured stays, whenever it ends
                bar.update()
            lines.append(f"{key} us by rows: {', '.join(times)}")
    return path, lines


def about(device: torch.device) -> dict[str, str]:
    """Where a table was measured."""
    return {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def random_weight(wanted: Wanted, device: torch.device) -> CudaInt4:
    """A packed weight of random codes; time does not depend on them."""
    n, k, group = wanted.out_features, wanted.in_features, wanted.group_size
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 16, (n, k // group), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) * 0.01 + 0.005).half()
    return layout.pack(codes, zeros, scales, group)


def candidates(w: CudaInt4, rows: int, machine: Machine) -> list[Choice]:
    """What is worth trying; whatever would not fit is left out, not tried."""
    wanted: list[Choice] = [None]
    if rows <= stream.MAX_ROWS:
        wanted += stream.candidates(w, rows, machine.multiprocessors, machine.capability)
    wanted += wide.candidates(w, rows, machine.multiprocessors)
    wanted += panel.candidates(w, rows, machine.multiprocessors)
    return [choice for choice in wanted if runs(choice, rows, w, machine.capability)]


def spec_of(choice: Choice, w: CudaInt4, rows: int, *, out_bf16: bool = True) -> KernelSpec:
    """The kernel of ours that a choice launches for bfloat16 rows."""
    if isinstance(choice, StreamShape):
        form = StreamCall(w.group, w.scale_kind, x_bf16=True, out_bf16=out_bf16)
        return stream.stream_spec(choice, form, rows, stream.stages_of(w))
    if isinstance(choice, WideShape):
        return wide.wide_spec(choice, w.group, w.scale_kind, out_bf16)
    if isinstance(choice, PanelShape):
        return panel.panel_spec(choice, w.group, w.scale_kind, out_bf16)
    return dequantised.dequantise_spec(w.group, w.scale_kind, out_bf16=True)


def specs(w: CudaInt4, rows: int, machine: Machine) -> list[KernelSpec]:
    """The kernels of all candidates."""
    return [spec_of(choice, w, rows) for choice in candidates(w, rows, machine)]


def call(machine: Machine, choice: Choice, x: torch.Tensor, w: CudaInt4, out: torch.Tensor) -> None:
    """One product by the chosen kernel."""
    if isinstance(choice, StreamShape):
        stream.launch(machine, choice, x, w, out)
    elif isinstance(choice, WideShape):
        wide.launch(machine, choice, x, w, out)
    elif isinstance(choice, PanelShape):
        panel.launch(machine, choice, x, w, out)
    else:
        dequantised.write(machine.programs, x, w, out)


def best(machine: Machine, copies: Sequence[CudaInt4], rows: int) -> tuple[Choice, float]:
    """The fastest candidate for `rows` rows and its time in microseconds."""
    w = copies[0]
    x = torch.randn(rows, w.in_features, device=w.codes.device).to(torch.bfloat16)
    expected = dequantised.multiply(machine.programs, x, w)
    right: list[Choice] = []
    calls: list[list[Callable[[], None]]] = []
    for choice in candidates(w, rows, machine):
        out = torch.full((rows, w.out_features), float("nan"), dtype=torch.bfloat16, device=x.device)
        call(machine, choice, x, w, out)
        error = float((out.float() - expected).norm() / expected.norm())
        if error < _MAX_ERROR:
            some = copies[: max(2, _MANY_ROWS // rows)]  # beyond, a call lasts and moves more than a cache holds
            calls.append([partial(call, machine, choice, x, copy, out) for copy in some])
            right.append(choice)
        else:
            logger.error("%s for %d rows of %s is wrong by %.1e and is not used", choice, rows, key_of(w), error)
    times = graph_times(calls)
    least = times.index(min(times))
    return right[least], times[least]


def copies_of(w: CudaInt4) -> list[CudaInt4]:
    """The weight and so many copies that reading them in turn reads memory, not a cache."""
    count = min(_MAX_COPIES, max(3, -(-_CACHES_BYTES // w.nbytes)))
    shape = (w.out_features, w.in_features, w.group_size)
    return [w, *(CudaInt4(w.codes.clone(), w.metas.clone(), shape, w.scale_kind) for _ in range(count - 1))]


def graph_times(rivals: Sequence[Sequence[Callable[[], object]]], replays: int = _REPLAYS) -> list[float]:
    """For each list microseconds of a call inside a CUDA graph of all of them: the median over replays.

    These alternate, for a GPU that has just worked hard is slower for all.
    """
    graphs = [_recorded(calls) for calls in rivals]
    times: list[list[float]] = [[] for _ in rivals]
    for _ in range(replays):
        for graph, calls, own in zip(graphs, rivals, times, strict=True):
            start, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            own.append(float(start.elapsed_time(end)) * 1e3 / len(calls))
    return [statistics.median(own) for own in times]


def _recorded(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls in one graph, replayed once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph
