"""A model's weights while it sleeps: their device memory is given back, their bytes stay in pinned host memory.

Choice: the memory under the tensors is taken away and put back (`UntypedStorage.resize_`), the tensors stay. Prevents:
layers that hold on to what was moved, and a second way of putting a model together. Addresses change, so what has
recorded them (graphs) must be made anew; kernels on a GPU read addresses at each launch. Rejected: reading the files
again, which takes several times as long and needs them still to be there (`drop_weights` does that); memory under
addresses that stay (the driver's virtual memory), for which torch wants an allocator of its own from the start.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from deepseek_tgi.errors import ResourceError

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 256
PIECE_BYTES = 1 << 30
"""Copied between two signs of progress."""
PACKAGE = "deepseek_tgi"


def storages_of(root: object, apart: Sequence[object], device: torch.device) -> list[torch.UntypedStorage]:
    """The memory on `device` under every tensor that `root` refers to through objects of ours, each once.

    What `apart` refers to (kernels and their scratch, ranks) is left out.
    """
    seen: set[int] = set()
    for other in apart:
        for _ in _tensors(other, seen):
            pass
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(root, seen):
        storage = tensor.untyped_storage()
        if tensor.device == device and storage.resizable() and storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def _tensors(root: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Depth first; `seen` has the ids of objects that were met, which live as long as `root`."""
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        if isinstance(thing, torch.Tensor):
            seen.add(id(thing))
            yield thing
        elif isinstance(thing, (list, tuple)):
            waiting += thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif type(thing).__module__.split(".")[0] == PACKAGE:
            seen.add(id(thing))
            waiting += _attributes(thing)


def _attributes(thing: object) -> list[object]:
    names = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name) for name in names if hasattr(thing, name))]


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class DeviceMemory:
    """Every way in which sleeping and waking touch a device. On `cpu` all of it works, unpinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"

    def host(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes] uint8` of host memory, pinned until nobody holds it. Raises `ResourceError`."""
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise ResourceError(f"host memory: cannot take {num_bytes} bytes for sleeping weights: {error}") from error
        if self._on_gpu and num_bytes:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            with torch.cuda.device(self.device):
                status = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
            if status:
                raise ResourceError(f"host memory: cannot pin {num_bytes} bytes for sleeping weights (CUDA {status})")
            storage = memory.untyped_storage()
            weakref.finalize(memory, _unpin, runtime, storage, memory.data_ptr())
        return memory

    def release(self, storage: torch.UntypedStorage) -> None:
        """Take the memory away; who refers to it must not look."""
        storage.resize_(0)

    def renew(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Put memory there again, of any content. Raises `ResourceError`."""
        try:
            storage.resize_(num_bytes)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ResourceError(f"{self.device}: cannot take {num_bytes} bytes: {error}") from error

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy bytes; done once `settle` returns."""
        target.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Wait for the copies."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def trim(self) -> None:
        """Let others have what is free."""
        if self._on_gpu:
            torch.cuda.empty_cache()


def _unpin(runtime: object, storage: torch.UntypedStorage, address: int) -> None:
    """`storage` is still held here, so that nobody else has these pages before they are unpinned."""
    runtime.cudaHostUnregister(address)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """One storage and where its bytes lie on the host."""

    storage: torch.UntypedStorage
    start: int
    num_bytes: int

    def on_host(self, host: torch.Tensor) -> torch.Tensor:
        return host[self.start : self.start + self.num_bytes]


class ParkedWeights:
    """Owner of the host's copy of what lay in `storages`, from `park` to the end of `restore`. For one thread."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], memory: DeviceMemory) -> None:
        self._memory = memory
        self._places: list[_Place] = []
        self._host: torch.Tensor | None = None
        self.num_bytes = 0
        """Of the host's memory."""
        for storage in storages:
            self._places.append(_Place(storage, self.num_bytes, storage.nbytes()))
            self.num_bytes += -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def park(self, told: Callable[[], None]) -> int:
        """Move everything to the host; bytes given back on the device. `told` hears of progress.

        Raises `ResourceError` if the host has no room; then nothing has changed.
        """
        started = time.perf_counter()
        host = self._memory.host(self.num_bytes)
        for place in self._places:
            for there, here in _pieces(self._bytes(place.storage), place.on_host(host)):
                self._memory.copy(there, here)
                self._memory.settle()
                told()
        for place in self._places:
            self._memory.release(place.storage)
        self._host = host
        self._memory.trim()
        freed = sum(place.num_bytes for place in self._places)
        logger.info("%d bytes of weights are on the host, %.2f s", freed, time.perf_counter() - started)
        return freed

    def restore(self, told: Callable[[], None]) -> None:
        """Move everything back, bit for bit. Raises `ResourceError` if the device has no room; all is parked still."""
        if self._host is None:
            return
        started = time.perf_counter()
        renewed: list[_Place] = []
        try:
            for place in self._places:
                self._memory.renew(place.storage, place.num_bytes)
                renewed.append(place)
        except ResourceError:
            for place in renewed:
                self._memory.release(place.storage)
            self._memory.trim()
            raise
        for place in self._places:
            for there, here in _pieces(self._bytes(place.storage), place.on_host(self._host)):
                self._memory.copy(here, there)
                self._memory.settle()
                told()
        self._host = None
        logger.info("%d bytes of weights are back, %.2f s", self.num_bytes, time.perf_counter() - started)

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._memory.device).set_(storage)


def _pieces(device: torch.Tensor, host: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for at in range(0, device.numel(), PIECE_BYTES):
        yield device[at : at + PIECE_BYTES], host[at : at + PIECE_BYTES]
