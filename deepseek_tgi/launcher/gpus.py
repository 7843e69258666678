"""The GPUs a model would compute on, without torch: what the driver's own tool tells."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata

MIB = 1 << 20


def gpus_for(device: str, num_ranks: int) -> list[int]:
    """Free bytes of each rank's GPU under the option `--device`; empty if the model computes on the CPU.

    As `adapters.devices` will choose, as far as that can be told: `auto` takes GPUs where there is one for every rank
    and torch is no CPU build.
    """
    if device == "cpu" or (device == "auto" and _torch_is_for_cpus()):
        return []
    first = int(device.partition(":")[2] or 0)
    free = free_bytes()[first : first + num_ranks]
    return free if len(free) == num_ranks else []


def free_bytes() -> list[int]:
    """Free memory of every NVIDIA GPU, in the driver's order; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return [int(line) * MIB for line in answer.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _torch_is_for_cpus() -> bool:
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True
