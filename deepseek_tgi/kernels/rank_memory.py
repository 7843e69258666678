"""Memory that the ranks of one machine share, to add up what each brings in microseconds.

A decode step sums two rows a layer; over sockets each sum costs more than the products around it (80 us against a few).
The file behind the memory has no name any more once all ranks have mapped it, so nothing is left behind by a crash.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepseek_tgi.kernels.library import NativeLibrary, RankRound

FOLDER = Path("/dev/shm")
SLOT_FLOATS = 1 << 18
LINE_BYTES = 64
QUICK_NS = 30_000
"""So long a rank waits with the interpreter lock in its hand: the others are usually there."""
SLICE_NS = 50_000_000

Late = Callable[[int, bool, float], None]
"""`late(rank, left, waited_s)` is told, every 50 ms, of a rank that is not there yet; it raises to give up."""


class RankMemory:
    """One rank's view. Every rank makes the same calls in turn, from one thread each."""

    def __init__(self, library: NativeLibrary, memory: mmap.mmap, rank: int, world: int) -> None:
        self._library = library
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._slots = self._bytes[LINE_BYTES * world :].view(torch.float32).view(2, world, SLOT_FLOATS)
        self._round = RankRound(rank, world, SLOT_FLOATS, 0)
        self._round_address = ctypes.addressof(self._round)
        self._missing = ctypes.c_int64()
        self._missing_address = ctypes.addressof(self._missing)

    def add_up(self, x: torch.Tensor, late: Late) -> None:
        """Replace `x` (float32, contiguous) by its sum over all ranks, taken in rank order on each."""
        flat = x.view(-1)
        for at in range(0, flat.shape[0], SLOT_FLOATS):
            part = flat[at : at + SLOT_FLOATS]
            self._meet(part, 1, late)

    def of_all(self, x: torch.Tensor, late: Late) -> torch.Tensor:
        """`[world, n]` from every rank's `x [n] float32`, n at most a slot; it holds until the next call."""
        self._meet(x, 0, late)
        return self._slots[self._round.round & 1, :, : x.shape[0]]

    def leave(self) -> None:
        """Tell the others not to wait."""
        self._library.quick.dstgi_leave(self._address, self._round.rank)

    def _meet(self, x: torch.Tensor, adds: int, late: Late) -> None:
        self._round.round += 1
        arguments = (self._address, self._round_address, x.data_ptr(), x.shape[0], adds)
        self._library.quick.dstgi_meet(*arguments, QUICK_NS, self._missing_address)
        started = time.monotonic()
        while self._missing.value >= 0:
            left, rank = divmod(self._missing.value, self._round.world)
            late(rank, bool(left), time.monotonic() - started)
            self._library.slow.dstgi_meet(*arguments, SLICE_NS, self._missing_address)


def memory_bytes(world: int) -> int:
    """Bytes that `world` ranks share."""
    return world * (LINE_BYTES + 2 * SLOT_FLOATS * 4)


def create(name: str, world: int) -> mmap.mmap:
    """Make and map the memory `name`, for this user alone. Raises `OSError` if the machine has not so much."""
    descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, memory_bytes(world))
        return mmap.mmap(descriptor, memory_bytes(world))
    finally:
        os.close(descriptor)


def attach(name: str, world: int) -> mmap.mmap:
    """Map what another rank has made. Raises `OSError` if that is not to be seen from here."""
    descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, memory_bytes(world))
    finally:
        os.close(descriptor)


def forget(name: str) -> None:
    """Take the name away; whoever has mapped the memory keeps it."""
    (FOLDER / name).unlink(missing_ok=True)
