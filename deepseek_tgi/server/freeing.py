"""Memory that a model leaves, given back to the system.

Choice: while a model goes, glibc gives up the free end of every arena, and then `malloc_trim` what is free within.
Prevents: a process that stays as large as the largest models it ever held at once: an arena of a thread keeps up to
64 MB at its end, which `malloc_trim` leaves alone. Rejected: a low threshold for good, with which every step would ask
the system for its temporaries again.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of `mallopt`."""
LOW_BYTES, USUAL_TRIM_BYTES, USUAL_MMAP_BYTES = 1 << 17, 64 << 20, 32 << 20
"""The usual ones are what glibc itself arrives at once large blocks have come and gone."""


@contextmanager
def giving_back() -> Iterator[None]:
    """What is freed within, by any thread, goes back to the system where it lies at the end of its arena."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None:
        yield
        return
    change(M_MMAP_THRESHOLD, USUAL_MMAP_BYTES)
    change(M_TRIM_THRESHOLD, LOW_BYTES)
    try:
        yield
    finally:
        change(M_TRIM_THRESHOLD, USUAL_TRIM_BYTES)


def trim() -> None:
    """Let torch and glibc give back what is free."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
