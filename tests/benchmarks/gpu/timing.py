"""Times on a GPU: launches recorded in a CUDA graph, replayed, the median kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Microseconds of one of `calls`, which run one after the other in one graph: the median over replays.

    Calls should differ in the memory they touch, so that the L2 cache holds nothing for them.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / len(calls))
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """What a large copy on the device reads and writes in a second."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_us([lambda: torch.neg(source, out=target)] * 4) * 1e-6)
