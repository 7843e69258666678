"""How much memory this process may still take: the machine's and that of every control group around it, or a GPU's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

UNLIMITED = 1 << 62
"""Version 1 control groups write a number near 2^63 for "no limit"."""


class MemoryReader(Protocol):
    """What warm-up asks; tests bring their own."""

    def available_bytes(self) -> int:
        """Memory that can be taken before the machine or a limit refuses."""

    def resident_bytes(self) -> int:
        """Memory this process holds now."""

    def peak_bytes(self) -> int:
        """Most it ever held."""


@dataclass(frozen=True, slots=True)
class LinuxMemory:
    """Reads /proc and the control groups (version 1 and 2); the roots are arguments for tests."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")

    def available_bytes(self) -> int:
        """See `MemoryReader`: the least of the machine's free memory and every enclosing limit's headroom."""
        free = _kib_field(self.proc / "meminfo", "MemAvailable")
        if free is None:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(0, min([free, *self._headrooms()]))

    def resident_bytes(self) -> int:
        """See `MemoryReader`."""
        return _kib_field(self.proc / "self/status", "VmRSS") or 0

    def peak_bytes(self) -> int:
        """See `MemoryReader`."""
        return _kib_field(self.proc / "self/status", "VmHWM") or 0

    def _headrooms(self) -> list[int]:
        found = []
        for line in _text(self.proc / "self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
            if controllers == "":
                names, root = ("memory.max", "memory.current"), self.cgroup
            elif "memory" in controllers.split(","):
                names, root = ("memory.limit_in_bytes", "memory.usage_in_bytes"), self.cgroup / "memory"
            else:
                continue
            found += [h for folder in _upwards(root, path) if (h := _headroom(folder, *names)) is not None]
        return found


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Asks the driver and torch's allocator about `device`, such as `cuda:0`; `fraction` of the GPU may be taken."""

    device: str
    fraction: float = 1.0

    def available_bytes(self) -> int:
        """See `MemoryReader`: what the driver has free, and what torch keeps without using it."""
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(0, free + kept - int(total * (1 - self.fraction)))

    def resident_bytes(self) -> int:
        """See `MemoryReader`."""
        import torch

        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        """See `MemoryReader`."""
        import torch

        return torch.cuda.max_memory_allocated(self.device)


def memory_of(device: str, cuda_fraction: float = 1.0) -> MemoryReader:
    """The reader of the memory that a model on `device` lives in."""
    return LinuxMemory() if device == "cpu" else CudaMemory(device, cuda_fraction)


def _upwards(root: Path, path: str) -> list[Path]:
    """The group's folder and all around it. In a container the path may not exist below the mounted root."""
    inner = Path(path.lstrip("/"))
    return [root / part for part in [inner, *inner.parents] if (root / part).is_dir()]


def _headroom(folder: Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= UNLIMITED:
        return None
    # File pages that the kernel gives back before it refuses memory.
    reclaimable = 0
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"} and value.isdecimal():
            reclaimable = max(reclaimable, int(value))
    return int(limit) - max(0, int(usage) - reclaimable)


def _kib_field(file: Path, name: str) -> int | None:
    for line in _text(file).splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
