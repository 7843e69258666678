"""How many threads this process may use: the least of CPU affinity and the container's CPU quota. No torch here.

The native kernels have threads of their own (native/pool.h). torch's OpenMP helpers, after each parallel torch op, spin
for milliseconds on the cores these need, unless `OMP_WAIT_POLICY=PASSIVE` stood in the environment before torch was
loaded: the shard's door puts it there. Where it is missing, torch gets one thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from deepseek_tgi.errors import ConfigError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _quota_of(folder: Path) -> float | None:
    """CPUs granted by the quota files in `folder` (cgroup v2, then v1); None if there is no limit."""
    limit = _read(folder / "cpu.max")
    if limit is None:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    else:
        quota, _, period = limit.partition(" ")
    try:
        granted = int(quota or "-1") / int(period or "100000")
    except (ValueError, ZeroDivisionError):
        return None
    return granted if granted > 0 else None


def cgroup_cpus(root: Path = _CGROUP_ROOT, membership: Path = _PROC_CGROUP) -> float | None:
    """CPUs the control groups of this process grant, or None without a limit.

    Every group from the process's own up to the root counts; the smallest quota holds. Source: cgroup-v2.rst
    `cpu.max`, sched-bwc.rst `cpu.cfs_quota_us`.
    """
    granted: list[float] = []
    for line in (_read(membership) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in (root, root / "unified") if not controllers else (root / "cpu", root / controllers):
            folder = base / path.lstrip("/")
            for group in (folder, *folder.parents):
                if not group.is_relative_to(base):
                    break
                quota = _quota_of(group)
                if quota is not None:
                    granted.append(quota)
    return min(granted, default=None)


def usable_threads(wish: int = 0, quota: float | None = None) -> int:
    """Threads to compute with: `wish` if positive, else affinity cut by the quota (rounded up), at least 1.

    `quota` defaults to what the control groups grant. Raises `ConfigError` for a negative wish.
    """
    if wish < 0:
        raise ConfigError(f"num_threads: got {wish}, expected 0 (what this process may use) or a positive number")
    if wish:
        return wish
    affinity = len(os.sched_getaffinity(0))
    granted = cgroup_cpus() if quota is None else quota
    return affinity if granted is None else max(1, min(affinity, math.ceil(granted)))


def torch_threads(threads: int, native: bool, environ: Mapping[str, str] | None = None) -> int:
    """Threads for torch's own ops beside `threads` kernel threads: all of them, or 1 if its helpers would spin."""
    policy = (os.environ if environ is None else environ).get("OMP_WAIT_POLICY", "")
    return 1 if native and policy.upper() != "PASSIVE" else threads
