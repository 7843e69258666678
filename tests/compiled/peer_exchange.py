"""Sums through peers' memory: 16 bytes at a time travel, in packets that are looked for at all ranks' at once."""

from __future__ import annotations

from compiled.kernels import CudaKernel

from deepseek_tgi.kernels.peer_exchange import kernel_of
from deepseek_tgi.kernels.peer_sizes import MAX_RANKS, PeerSizes

PACKETS = (r"STG\.E\.128\.STRONG\.SYS", r"LDG\.E\.128\.STRONG\.SYS")
FLAGS = (r"STG\.E\.128", r"STG\.E\.STRONG\.SYS", r"MEMBAR\..*\.SYS", r"LDG\.E\.128\.STRONG\.GPU")

CUDA = [
    CudaKernel(kernel_of(PeerSizes(world), name), registers, must)
    for world in (2, 4, MAX_RANKS)
    for name, registers, must in (("peer_sum", 64, PACKETS), ("peer_sum_long", 96, FLAGS), ("peer_gather", 128, FLAGS))
]
