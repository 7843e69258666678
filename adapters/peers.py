"""What GPUs exchange through each other's memory: how ranks come to it, what says no, and how a wait ends.

Choice: each rank lends the others memory of its own GPU, tries it in sums whose results are known, and all use it or
none does. Prevents: a machine whose GPUs say that they reach each other and lose what they write, and ranks that add up
in different ways. Rejected: NCCL alone, whose smallest sum takes longer than the products around it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.peer_memory import PeerMemory
from deepseek_tgi.kernels.peer_exchange import PeerExchange, PeerPlaces
from deepseek_tgi.kernels.peer_sizes import CHUNK_FLOATS, MAX_RANKS, PACKET_FLOATS, PeerSizes

if TYPE_CHECKING:
    from deepseek_tgi.adapters.parallel import RankGroup

logger = logging.getLogger(__name__)

TRIAL_S = 10.0
"""How long the first sums may take: ranks have just met, so they come at once."""
TRIALS = (1, 77, 4096)
"""Floats of sums that are tried, besides the longest ones."""
REPEATED = 8191
"""Of numbers that are tried: sums of eight are exact."""
FAILURES = (BuildError, DeviceError, RuntimeError, ImportError, OSError)
"""Of what is asked of the device: they mean that there is another way."""
FIRST_LATE = 2
"""Of the word `over`: from here on the number of the rank that did not come."""


class Peers:
    """Owner of what one rank lends to the others and has of theirs, and of what they exchange through it."""

    def __init__(self, memory: PeerMemory, exchange: PeerExchange) -> None:
        self._memory = memory
        self.exchange = exchange

    @property
    def late_rank(self) -> int | None:
        """Who was waited for in vain."""
        over = self._memory.over
        return over - FIRST_LATE if over >= FIRST_LATE else None

    def end(self) -> None:
        """Wait for nobody any more; from any thread."""
        self._memory.end()

    def let_go(self) -> None:
        """Give back what the others lend; nothing runs any more."""
        self._memory.let_go()

    def close(self) -> None:
        """Take back what is lent to the others, who have let go."""
        self._memory.close()


def connect(group: RankGroup, device: torch.device, timeout_s: float) -> Peers | None:
    """What exchanges on `device` go through where they fit; None if that is NCCL for all, said with its reason.

    Every rank must call it.
    """
    peers, why = _connected(group, device)
    if peers is None:
        logger.info("ranks exchange through NCCL alone, which is slower for few tokens: %s", why)
        return None
    peers.exchange.timeout_s = timeout_s
    most = peers.exchange.most_floats
    logger.info(
        "ranks exchange through each other's memory%s",
        "" if most is None else f", and through NCCL what has more than {most} numbers to add up",
    )
    return peers


def _connected(group: RankGroup, device: torch.device) -> tuple[Peers | None, str]:
    """Peers that have been tried, or why not."""
    if group.world_size > MAX_RANKS:
        return None, f"there are more than {MAX_RANKS} of them"
    if not group.on_one_machine:
        return None, "they are on several machines or in several containers"
    memory, own, why = _lend(device, PeerSizes(group.world_size).num_bytes)
    all_told = group.tell_all(own)
    if memory is None or not all(all_told):
        if memory is not None:
            memory.close()
        return None, why or f"rank {all_told.index(b'')} has no memory for it"
    peers = None
    try:
        places = PeerPlaces(group.rank, memory.reach(all_told, group.rank), memory.over_address)
        peers = Peers(memory, PeerExchange(machine_of(device).programs, places, device, TRIAL_S))
    except FAILURES as error:
        why = _reason(error)
    if group.smallest(int(peers is not None)):
        assert peers is not None, "all ranks said so"
        why = _tried(peers, group, device)
        if group.smallest(int(not why)):
            return peers, ""
        why = why or "another rank's first sums came out wrong"
    memory.let_go()
    group.smallest(0)  # nobody has it open any more
    memory.close()
    return None, why or "another rank does not reach the memory of all"


def _lend(device: torch.device, num_bytes: int) -> tuple[PeerMemory | None, bytes, str]:
    """Memory and what to tell of it, or why there is none: the others wait to be told, whatever it is."""
    memory = None
    try:
        machine_of(device)
        memory = PeerMemory(device, num_bytes)
        return memory, memory.told(), ""
    except FAILURES as error:
        with suppress(*FAILURES):
            if memory is not None:
                memory.close()
        return None, b"", _reason(error)


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _tried(peers: Peers, group: RankGroup, device: torch.device) -> str:
    """What is wrong with exchanges whose results are known, in every inbox; empty if nothing is."""
    try:
        right = _adds_up(peers.exchange, group, device) and _gathers(peers.exchange, group, device)
    except FAILURES as error:
        return _reason(error)
    late = peers.late_rank
    if late is not None:
        return f"nothing came from rank {late} within {TRIAL_S:g} s in their first sums"
    return "" if right else "their first sums came out wrong"


def _adds_up(exchange: PeerExchange, group: RankGroup, device: torch.device) -> bool:
    """Whether sums of small whole numbers, which are exact, are what they must be."""
    right, sizes = True, exchange.sizes
    most = (sizes.packets * PACKET_FLOATS, sizes.floats)
    for count in (*TRIALS, *most, sizes.floats - CHUNK_FLOATS - 1, *most):
        numbers = _numbers(count, device)
        own = numbers + group.rank
        exchange.add_up(own)
        wanted = numbers * group.world_size + group.world_size * (group.world_size - 1) // 2
        right = right and torch.equal(own, wanted)
    return right


def _gathers(exchange: PeerExchange, group: RankGroup, device: torch.device) -> bool:
    """Whether columns stand side by side, those of odd widths too; twice, for there are two inboxes from each rank."""
    right, world = True, group.world_size
    for rows, widths in ((3, [5 + rank for rank in range(world)]), (1, [CHUNK_FLOATS + 4] * world)):
        for _ in range(2):
            columns = [_numbers(rows * width, device).view(rows, width) + rank for rank, width in enumerate(widths)]
            out = torch.empty(rows, sum(widths), device=device)
            exchange.gather(columns[group.rank], widths, out)
            right = right and torch.equal(out, torch.cat(columns, 1))
    return right


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """0, 1, 2 ... of which no two that are near are the same."""
    return torch.arange(count, dtype=torch.int32, device=device).remainder_(REPEATED).float()
