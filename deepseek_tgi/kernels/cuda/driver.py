"""Loads machine code into a device and launches it on torch's streams, through the driver's own interface."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from deepseek_tgi.errors import DeviceError
from deepseek_tgi.kernels.cuda.nvrtc import arch_of, machine_code
from deepseek_tgi.kernels.cuda.program import Argument, Kernel, KernelSpec, Shape, Tiles

_ALL = 100
"""Percent."""
_TILE_MAP_BYTES = 128
_FORMATS = {"p": "P", "i": "i", "l": "q", "f": "f", "t": f"{_TILE_MAP_BYTES}s"}
"""How `struct` writes a parameter of each kind."""
_TENSOR, _NUMBERS = torch.Tensor, frozenset({int, float})


@lru_cache(maxsize=4096)
def _tile_map(
    address: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """The driver's description of a tensor, kept since activations lie at the same few addresses."""
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    many, few = driver.cuuint64_t, driver.cuuint32_t
    encoded = _checked(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16 if itemsize == 2 else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT32,
            len(shape),
            address,
            [many(size) for size in reversed(shape)],
            [many(stride * itemsize) for stride in reversed(strides[:-1])],
            [few(size) for size in reversed(box)],
            [few(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if itemsize == 2 else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "a tile map",
    )
    return ctypes.string_at(int(encoded.getPtr()), _TILE_MAP_BYTES)


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
        self._places = threading.local()
        if spec.beside:  # a multiprocessor changes how much of its memory is shared only when it is empty
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            _checked(driver.cuFuncSetAttribute(self._function, attribute, _ALL), spec.name)
        if room:  # needed from 48 KiB on, what is fixed in the source included
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._function, attribute, room), spec.name)

    def __call__(self, grid: Shape, block: int, arguments: Sequence[Argument], *, overlap: bool = False) -> None:
        """See `Kernel`. Raises `DeviceError` if the launch is refused."""
        try:
            place = self._places.place
        except AttributeError:
            place = self._places.place = LaunchPlace(self._spec, self._driver)
        # Torch's own object for it costs more than a launch.
        stream = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        config = place.overlapping if overlap and self._overlaps else place.plain
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX = block
        config.hStream = stream
        place.write(arguments)
        launched = self._driver.cuLaunchKernelEx(config, self._function, place.pointers, 0)
        if launched[0]:
            _checked(launched, self._spec.name)


class LaunchPlace:
    """Where one thread writes a kernel's parameters and the shape of its launch: made once, read by each launch."""

    def __init__(self, spec: KernelSpec, driver: Any) -> None:
        self._kinds = spec.signature
        self._name = spec.name
        self._layout = struct.Struct("@" + "".join(_FORMATS[kind] for kind in spec.signature))
        self._memory = ctypes.create_string_buffer(self._layout.size)
        start = ctypes.addressof(self._memory)
        self._addresses = (ctypes.c_void_p * len(self._kinds))(*(start + at for at in _offsets(self._kinds)))
        self.pointers = ctypes.addressof(self._addresses)
        """Where the driver finds the address of each parameter."""
        self.plain, self.overlapping = (_launch_config(driver, spec.shared_bytes, overlap) for overlap in (False, True))

    def write(self, arguments: Sequence[Argument]) -> None:
        """Take the parameters of the next launch."""
        assert len(arguments) == len(self._kinds), f"{self._name}: {len(arguments)} arguments for {self._kinds!r}"
        plain = [
            value.data_ptr() if type(value) is _TENSOR else value if type(value) in _NUMBERS else _plain(value)
            for value in arguments
        ]
        self._layout.pack_into(self._memory, 0, *plain)


def _plain(value: Argument) -> int | float | bytes:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if value is None:
        return 0
    return _tile_map_of(value) if isinstance(value, Tiles) else value


def _tile_map_of(tiles: Tiles) -> bytes:
    """The driver's description of `tiles`, kept with them for as long as the tensor lies where it lay."""
    x = tiles.tensor
    address = x.data_ptr()
    kept: tuple[int, bytes] | None = tiles.kept[0] if tiles.kept else None
    if kept is None or kept[0] != address:
        kept = address, _tile_map(address, x.element_size(), tuple(x.shape), x.stride(), tiles.box)
        tiles.kept[:] = [kept]
    return kept[1]


def _offsets(kinds: str) -> list[int]:
    """Where each parameter of a signature begins: `struct` ends before what would align the next one."""
    formats = [_FORMATS[kind] for kind in kinds]
    return [struct.calcsize("@" + "".join(formats[: i + 1])) - struct.calcsize(formats[i]) for i in range(len(kinds))]


def _launch_config(driver: Any, shared_bytes: int, overlap: bool) -> Any:
    config = driver.CUlaunchConfig()
    config.blockDimY, config.blockDimZ = 1, 1
    config.sharedMemBytes = shared_bytes
    if overlap:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value = value
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _checked(result: tuple[Any, ...], name: str) -> Any:
    status, *values = result
    if int(status):
        raise DeviceError(f"kernel {name}: the driver says {status.name}")
    return values[0] if values else None
