"""From mapped files to the GPU: stored tensors go through pinned memory, and are unpacked where they arrive.

Choice: the host copies a piece of a file into pinned memory while the piece before it is on its way and the GPU unpacks
what came earlier; a thread of its own asks the kernel to read ahead. Prevents: a load that reads, moves and re-lays one
after the other, and unpacking four bits on the host, which is ten times slower than the link. Rejected: pinning the
mapped files themselves, which keeps all of them in memory and takes longer than copying.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from deepseek_tgi.adapters.staging import PinnedRing

PIECE_BYTES = 32 << 20
READ_AHEAD_BYTES = 16 << 20


class Transfer:
    """Moves tensors to `device`, and counts what it moved. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0
        self.host_s = 0.0
        """Seconds in which the host read files and filled pinned memory, waiting for it included."""
        self._ring = PinnedRing(device)

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        """A copy of `stored`, dense, on the device; it is there for whatever is launched from now on."""
        start = time.perf_counter()
        moved = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        source = stored.contiguous().view(-1).view(torch.uint8)
        target = moved.view(-1).view(torch.uint8)
        for at in range(0, source.numel(), PIECE_BYTES):
            piece = source[at : at + PIECE_BYTES]
            with self._ring.stretch(piece.numel()) as pinned:
                pinned.copy_(piece)
                target[at : at + PIECE_BYTES].copy_(pinned, non_blocking=True)
        self.num_bytes += source.numel()
        self.host_s += time.perf_counter() - start
        return moved


class ReadAhead:
    """Has the kernel read `files` into its cache, in order, until they are through or `stop` is called."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the rest."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        for path in self._files:
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError:
                return  # whoever maps the file says what is wrong with it
            try:
                for at in range(0, os.fstat(descriptor).st_size, READ_AHEAD_BYTES):
                    if self._stopped.is_set():
                        return
                    os.posix_fadvise(descriptor, at, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
