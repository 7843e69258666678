"""Times on a GPU: launches recorded in a CUDA graph, replayed, the median kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Microseconds of one of `calls`, which run one after the other in one graph: the median over replays.

    Calls should differ in the memory they touch, so that the L2 cache holds nothing for them.
    """
    return side_by_side([calls], replays)[0]


def side_by_side(rivals: Sequence[Sequence[Callable[[], object]]], replays: int = 15) -> list[float]:
    """`graph_us` of each of `rivals`, whose replays alternate: a GPU that has just worked hard is slower for all."""
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


def copy_bytes_per_s() -> float:
    """What a large copy on the device reads and writes in a second."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_us([lambda: torch.neg(source, out=target)] * 4) * 1e-6)
