"""Loads machine code into a device and launches it on torch's streams, through the driver's own interface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.cuda.nvrtc import arch_of, machine_code
from deepseek_tgi.kernels.cuda.program import Argument, Kernel, KernelSpec, Shape

_STATIC_SHARED_LIMIT = 48 << 10
"""Dynamic shared memory beyond this must be asked for, once a function."""

_MAKERS: dict[str, Callable[[Any], Any]] = {
    "p": lambda x: ctypes.c_void_p(0 if x is None else x.data_ptr()),
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
}


class DriverPrograms:
    """The kernels of one device, each compiled and loaded once. Owns the loaded modules for the process's life."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        major, minor = torch.cuda.get_device_capability(device)
        self.arch = arch_of(major, minor)
        self._overlaps = major >= 9
        self._kernels: dict[KernelSpec, DriverKernel] = {}
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._shared_bytes: dict[tuple[str, str, tuple[str, ...]], int] = {}

    def kernel(self, spec: KernelSpec) -> Kernel:
        """See `Programs`. Raises `DeviceError` if the source does not compile or does not load."""
        found = self._kernels.get(spec)
        if found is None:
            with torch.cuda.device(self._device):
                found = DriverKernel(spec, self._module(spec), self._device, self._overlaps, self._room(spec))
            self._kernels[spec] = found
        return found

    def _room(self, spec: KernelSpec) -> int:
        """The most shared memory that any spec of the same function wants: asking for less takes it from the others."""
        key = (spec.source, spec.name, spec.flags)
        room = max(spec.shared_bytes, self._shared_bytes.get(key, 0))
        self._shared_bytes[key] = room
        return room

    def _module(self, spec: KernelSpec) -> Any:
        """All kernels of the spec's source under its macros, loaded."""
        from cuda.bindings import driver

        key = (spec.source, spec.flags)
        if key not in self._modules:
            torch.zeros(1, device=self._device)  # the context is current from here on
            self._modules[key] = _checked(driver.cuModuleLoadData(machine_code(spec, self.arch)), spec.name)
        return self._modules[key]


class DriverKernel:
    """See `Kernel`. Arguments must live on the kernel's device; the caching allocator keeps their memory in order."""

    def __init__(self, spec: KernelSpec, module: Any, device: torch.device, overlaps: bool, room: int) -> None:
        """`room`: dynamic shared memory that launches of the function, of this spec and of others, may ask for."""
        from cuda.bindings import driver

        self._driver = driver
        self._spec = spec
        self._device = device
        self._overlaps = overlaps
        self._function = _checked(driver.cuModuleGetFunction(module, spec.name.encode()), spec.name)
        if room > _STATIC_SHARED_LIMIT:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._function, attribute, room), spec.name)

    def __call__(self, grid: Shape, block: int, arguments: Sequence[Argument], *, overlap: bool = False) -> None:
        """See `Kernel`. Raises `DeviceError` if the launch is refused."""
        kinds = self._spec.signature
        assert len(arguments) == len(kinds), f"{self._spec.name}: {len(arguments)} arguments for {kinds!r}"
        slots = [_MAKERS[kind](value) for kind, value in zip(kinds, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(slot) for slot in slots))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if overlap and self._overlaps:
            result = self._launch_overlapping(grid, block, stream, ctypes.addressof(pointers))
        else:
            result = self._driver.cuLaunchKernel(
                self._function, *grid, block, 1, 1, self._spec.shared_bytes, stream, ctypes.addressof(pointers), 0
            )
        _checked(result, self._spec.name)

    def _launch_overlapping(self, grid: Shape, block: int, stream: int, pointers: int) -> tuple[Any, ...]:
        driver = self._driver
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value = value
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = self._spec.shared_bytes
        config.hStream = stream
        config.attrs = [attribute]
        config.numAttrs = 1
        result: tuple[Any, ...] = driver.cuLaunchKernelEx(config, self._function, pointers, 0)
        return result


def _checked(result: tuple[Any, ...], name: str) -> Any:
    status, *values = result
    if int(status):
        raise DeviceError(f"kernel {name}: the driver says {status.name}")
    return values[0] if values else None
