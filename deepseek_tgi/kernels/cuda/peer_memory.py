"""Memory of one GPU that the GPUs of other processes of the machine write to (CUDA IPC)."""

from __future__ import annotations

import ctypes
import secrets
import struct
from collections.abc import Sequence
from typing import Any

import torch

from deepseek_tgi.errors import DeviceError

PAGE_BYTES = 2 << 20
"""Of memory that is lent as a whole: smaller pieces share a page, and would be lent together."""
_THIS_PROCESS = secrets.token_bytes(16)
_TOLD = struct.Struct("16s64s")
"""Whose the memory is, and what opens it elsewhere."""
_HOST_BYTES = 64


class PeerMemory:
    """Owner of zeroed memory on `device`, of the ways to other ranks' that were opened here, and of the word `over`.

    For one thread; `over` for any. Raises `DeviceError` for what the driver refuses.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = device
        num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self._opened: list[Any] = []
        self._memory: Any = None
        self._host: Any = None
        try:
            with torch.cuda.device(device):
                torch.zeros(1, device=device)  # the context is current from here on
                self._memory = self._asked(driver.cuMemAlloc(num_bytes), "memory")
                self._asked(driver.cuMemsetD8(self._memory, 0, num_bytes), "memory")
                flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
                self._host = self._asked(driver.cuMemHostAlloc(_HOST_BYTES, flags), "memory of the host")
                self.over_address = int(self._asked(driver.cuMemHostGetDevicePointer(self._host, 0), "host memory"))
                torch.cuda.synchronize(device)
        except BaseException:
            self.close()
            raise
        self._over = ctypes.c_uint32.from_address(int(self._host))
        self._over.value = 0

    @property
    def over(self) -> int:
        """A word that the GPU sees as well: 0 until a rank is given up."""
        return int(self._over.value)

    def end(self) -> None:
        """Tell the GPU to wait for nobody any more."""
        if self._host is not None and not self._over.value:
            self._over.value = 1

    def told(self) -> bytes:
        """What another rank must know to `reach` this memory."""
        with torch.cuda.device(self._device):
            handle = self._asked(self._driver.cuIpcGetMemHandle(self._memory), "a handle of its memory")
        return _TOLD.pack(_THIS_PROCESS, bytes(handle.reserved))

    def reach(self, all_told: Sequence[bytes], own: int) -> list[int]:
        """Where each rank's memory is for kernels of this device, in the order given; this rank is number `own`."""
        with torch.cuda.device(self._device):
            return [int(self._memory) if rank == own else self._reach(told, rank) for rank, told in enumerate(all_told)]

    def _reach(self, told: bytes, rank: int) -> int:
        process, handle = _TOLD.unpack(told)
        if process == _THIS_PROCESS:  # the driver opens nothing of the process's own
            raise DeviceError(f"{self._device}: rank {rank} is in the same process")
        wanted = self._driver.CUipcMemHandle()
        wanted.reserved = handle
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        opened = self._asked(self._driver.cuIpcOpenMemHandle(wanted, flags), f"way to the memory of rank {rank}")
        self._opened.append(opened)
        return int(opened)

    def let_go(self) -> None:
        """Close the ways to other ranks' memory; nothing runs that uses them."""
        opened, self._opened = self._opened, []
        with torch.cuda.device(self._device):
            if opened:
                torch.cuda.synchronize(self._device)
            for address in opened:
                self._driver.cuIpcCloseMemHandle(address)

    def close(self) -> None:
        """Give the memory back; no other rank has it open any more."""
        self.let_go()
        memory, self._memory = self._memory, None
        host, self._host = self._host, None
        self._over = ctypes.c_uint32(1)  # who still asks
        with torch.cuda.device(self._device):
            if memory is not None:
                self._driver.cuMemFree(memory)
            if host is not None:
                self._driver.cuMemFreeHost(host)

    def _asked(self, result: tuple[Any, ...], what: str) -> Any:
        status, *values = result
        if int(status):
            raise DeviceError(f"{self._device}: the driver gives no {what}: {status.name}")
        return values[0] if values else None
