"""Times on a GPU: launches recorded in a CUDA graph, replayed, the median kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepseek_tgi.kernels.int4_linear.tune import graph_times

REPLAYS = 15


def graph_us(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Microseconds of one of `calls`, which run one after the other in one graph: the median over replays.

    Calls should differ in the memory they touch, so that the L2 cache holds nothing for them.
    """
    return graph_times([calls], replays)[0]


def copy_bytes_per_s() -> float:
    """What a large copy on the device reads and writes in a second."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_us([lambda: torch.neg(source, out=target)] * 4) * 1e-6)
