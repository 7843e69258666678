"""Numbers and the circumstances they were taken in: samples, memory of processes, memory bandwidth, machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one rate; the median is the figure, the extremes are its spread."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:8.1f} ({min(self.values):.1f}-{max(self.values):.1f})"

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": list(self.values)}


def descendants(pid: int) -> list[int]:
    """`pid` and every live process below it."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [pid]
    for candidate in found:
        found += [child for child, parent in parents.items() if parent == candidate]
    return found


def peak_memory_bytes(pid: int) -> dict[str, int]:
    """Largest resident size so far of `pid` and each process below it, by what they are."""
    peaks: dict[str, int] = {}
    for process in descendants(pid):
        try:
            words = Path("/proc", str(process), "cmdline").read_bytes().decode(errors="replace").split("\0")
            status = Path("/proc", str(process), "status").read_text()
        except OSError:
            continue
        peak = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
        role = next((word for word in words[1:] if word and not word.startswith("-")), words[0])
        peaks[f"{Path(role).name} [{len(peaks)}]"] = peak
    return peaks


def read_bandwidth_bytes_per_s(repeats: int = 7) -> float:
    """Memory read rate of all our threads: the best of several sums over an array no cache holds."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    array = torch.ones(256 * 1024 * 1024, dtype=torch.float32)
    best = 0.0
    for _ in range(repeats):
        started = time.perf_counter()
        array.sum()
        best = max(best, array.numel() * 4 / (time.perf_counter() - started))
    return best


def machine_ticks() -> tuple[int, int]:
    """Clock ticks of all processors so far: busy (a hypervisor's other guests included) and in all."""
    words = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(words) - words[3] - words[4], sum(words)


def own_ticks() -> int:
    """Clock ticks that this process and every live one below it have used so far."""
    spent = 0
    for pid in descendants(os.getpid()):
        try:
            fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        spent += int(fields[11]) + int(fields[12])
    return spent


def idle_share(seconds: float = 2.0) -> float:
    """Share of the processors that did nothing for a while: 1.0 on a quiet machine."""
    busy, total = machine_ticks()
    time.sleep(seconds)
    busy_after, total_after = machine_ticks()
    return 1 - (busy_after - busy) / max(1, total_after - total)


def with_foreign_share(run: Callable[[], T]) -> tuple[T, float]:
    """Result of `run`, and the share of the processors that somebody else used meanwhile."""
    busy, total = machine_ticks()
    own = own_ticks()
    result = run()
    busy_after, total_after = machine_ticks()
    foreign = (busy_after - busy) - (own_ticks() - own)
    return result, max(0, foreign) / max(1, total_after - total)


def circumstances() -> dict[str, Any]:
    """Commit, date, CPU, versions: what a reader needs to judge or repeat a figure."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    versions = {name: _version(name) for name in ("deepseek-tgi", "torch", "tokenizers", "grpcio", "uvicorn")}
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu,
        "threads": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "idle": idle_share(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
    }


def commit() -> str:
    """The commit that is measured, marked if the checkout has changes."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(name: str) -> str:
    """Of an installed distribution; our own may run from a checkout."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
