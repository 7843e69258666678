"""The processes of a model's ranks, and which of them have ended."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")
"""Tells apart whose numbers of processes are not the same: two containers of one machine, for example."""


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process; `machine` tells apart whose process ids mean nothing here."""

    pid: int
    machine: str

    @classmethod
    def own(cls) -> Process:
        """This one."""
        return cls(os.getpid(), _machine())

    def runs(self) -> bool:
        """False for a process of this machine that has ended; one of another machine counts as running."""
        if self.machine != _machine():
            return True
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def ended(processes: Sequence[Process], ranks: Sequence[int], wait_s: float) -> list[int]:
    """Those of `ranks` whose process has ended; a killed one's connections close a moment before that shows."""
    deadline = time.monotonic() + wait_s
    while not (gone := [rank for rank in ranks if not processes[rank].runs()]):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return gone


def listed(numbers: Sequence[int]) -> str:
    """`0, 2` of rank or process numbers."""
    return ", ".join(str(number) for number in numbers)


def _machine() -> str:
    try:
        return f"{BOOT_ID.read_text().strip()} {PROCESSES.readlink()}"
    except OSError:
        return socket.gethostname()
