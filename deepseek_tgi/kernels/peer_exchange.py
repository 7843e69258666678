"""What ranks on GPUs that reach each other's memory exchange, a launch each: sums, twice a layer, and logits' columns.

A library's all-reduce of few tokens takes longer than the products around it; see `peer_sum.cu` for how these go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.cuda.program import Argument, Kernel, KernelSpec, Programs, spec
from deepseek_tgi.kernels.peer_sizes import CHUNK_FLOATS, MAX_RANKS, PACKET_FLOATS, THREADS, PeerSizes

COUNTED = 1 << 30
"""Elements of what is gathered: kernels count them in 32 bits."""
STATE_WORDS = 2
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PeerPlaces:
    """Addresses as one rank's GPU sees them: the memory of every rank, in rank order, `PeerSizes.num_bytes` each, zeros
    at first, and the word `over` that it shares with the host (see `inboxes.cuh`).
    """

    rank: int
    memory: Sequence[int]
    over: int


class PeerExchange:
    """The ops on one rank; every rank makes the same calls in the same order, on one stream at a time."""

    def __init__(self, programs: Programs, places: PeerPlaces, device: torch.device, timeout_s: float) -> None:
        """`timeout_s`: how long a rank is waited for."""
        self.sizes = PeerSizes(len(places.memory))
        self._short, self._long = (
            programs.kernel(kernel_of(self.sizes, name)) for name in ("peer_sum", "peer_sum_long")
        )
        self._gather = programs.kernel(kernel_of(self.sizes, "peer_gather"))
        self._world = len(places.memory)
        self._none = (0,) * (MAX_RANKS - self._world)
        self._places = (places.rank, places.memory[places.rank], *places.memory, *self._none)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(self.sizes.packets * PACKET_FLOATS, device=device)
        self._over = places.over
        self.timeout_s = timeout_s

    @property
    def most_floats(self) -> int | None:
        """The longest sum that this takes no longer for than a library; None for any.

        Each rank sends all it has to each other one: for two no other way sends less.
        """
        return None if self._world == 2 else self.sizes.floats

    def adds_up(self, x: torch.Tensor) -> bool:
        """True for what `add_up` is for, on every rank alike."""
        return x.dtype == torch.float32 and (self.most_floats is None or x.numel() <= self.most_floats)

    def parts_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Zeros of the shape of `x`, which parts may be added to until `add_up` is called with them; None for what is
        too long.
        """
        return None if x.numel() > self._zeros.shape[0] else self._zeros[: x.numel()].view(x.shape)

    def add_up(self, x: torch.Tensor, parts: torch.Tensor | None = None) -> None:
        """Replace `x` (dense) by its sum over all ranks, taken in rank order on each; NaN if one did not come.

        What this rank brings is `parts`, of `parts_of`, if they are given.
        """
        flat = x.view(-1)
        count = flat.shape[0]
        if count <= self._zeros.shape[0]:
            if count:
                own = flat if parts is None else parts
                self._launch(self._short, -(-count // (PACKET_FLOATS * THREADS)), THREADS, (own, flat, count))
            return
        for at in range(0, count, self.sizes.floats):
            piece = flat[at : at + self.sizes.floats]
            self._launch_long(self._long, piece, piece.shape[0], (piece, piece.shape[0]))

    def gathers(self, rows: int, widths: Sequence[int]) -> bool:
        """True for what `gather` is for, on every rank alike."""
        return 0 < rows * sum(widths) < COUNTED and min(widths) > 0

    def gather(self, own: torch.Tensor, widths: Sequence[int], out: torch.Tensor) -> None:
        """Write `out [R, sum(widths)]`, dense, from every rank's `own [R, widths[rank]]`, dense; NaN as by `add_up`."""
        rows, longest = own.shape[0], own.shape[0] * max(widths)
        assert own.is_contiguous(), "columns are gathered as they lie in memory"
        assert out.is_contiguous(), "columns are gathered as they lie in memory"
        assert out.data_ptr() % 16 == 0, "what is long is of whole 16-byte words"
        for start in range(0, longest, self.sizes.floats):
            arguments: Sequence[Argument] = (own, out, rows, start, *widths, *self._none)
            self._launch_long(self._gather, own, min(self.sizes.floats, longest - start), arguments)

    def _launch_long(self, kernel: Kernel, x: torch.Tensor, count: int, arguments: Sequence[Argument]) -> None:
        assert x.data_ptr() % 16 == 0, "what is long is of whole 16-byte words"
        self._launch(kernel, -(-count // CHUNK_FLOATS), self.sizes.long_threads, arguments)

    def _launch(self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[Argument]) -> None:
        waiting = (self._state, self._over, int(self.timeout_s * NS))
        kernel((blocks, 1, 1), threads, (*arguments, *self._places, *waiting), overlap=True)


def kernel_of(sizes: PeerSizes, name: str) -> KernelSpec:
    """`peer_sum`, `peer_sum_long` or `peer_gather`."""
    short, gathers = name == "peer_sum", name == "peer_gather"
    source = "peer_gather" if gathers else "peer_sum"
    arguments = "ppii" + "i" * MAX_RANKS if gathers else "ppi" if short else "pi"
    threads = THREADS if short else sizes.long_threads
    macros = {"THREADS": threads, "WORLD": sizes.world, "PACKETS": sizes.packets, "FLOATS": sizes.floats}
    macros["VECTORS"] = CHUNK_FLOATS // (sizes.long_threads * 4)
    return spec(source, name, arguments + "ip" + "p" * MAX_RANKS + "ppl", **macros)
