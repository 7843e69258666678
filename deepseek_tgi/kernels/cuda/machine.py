"""The device that kernels run on, as launches see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.program import Programs


@dataclass(frozen=True, slots=True)
class Machine:
    """A device's programs, the number of its multiprocessors and its capability (90 for sm_90)."""

    programs: Programs
    multiprocessors: int
    capability: int


def shared_limit(capability: int) -> int:
    """Bytes of shared memory that a block may have (CUDA programming guide, technical specifications)."""
    if 90 <= capability < 120:
        return 227 << 10
    return (163 if capability in (80, 87) else 99) << 10


@cache
def machine_of(device: torch.device) -> Machine:
    """The machine of a CUDA device, one for all ops, so that each kernel is loaded once.

    Raises `BuildError` if kernels cannot be compiled or started here.
    """
    try:
        from cuda.bindings import driver, nvrtc

        from deepseek_tgi.kernels.cuda.driver import DriverPrograms

        driver.cuDriverGetVersion()
        nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise BuildError(f"CUDA C++ cannot be compiled here: {error}") from error
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        raise BuildError(f"CUDA C++ is for sm_80 and newer, {device} is sm_{properties.major}{properties.minor}")
    return Machine(DriverPrograms(device), properties.multi_processor_count, properties.major * 10 + properties.minor)
