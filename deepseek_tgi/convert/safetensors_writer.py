"""Writing a safetensors file tensor by tensor, so that a model never has to fit in memory.

Choice: a writer of our own. Prevents holding every tensor at once, which is what `safetensors.torch.save_file` takes.
Source: the safetensors format description; tensors follow each other in the order planned, without gaps.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from deepseek_tgi.adapters.safetensors_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """What will be written under a name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the planned tensors in their order; owns the open file.

    Space is reserved at once, so that a full disk shows before the work.
    """

    def __init__(self, path: Path, plan: Sequence[PlannedTensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write the header of `plan`. Raises `OSError` (ENOSPC) if the file does not fit."""
        self._waiting = list(reversed(plan))
        header = _header(plan, {"format": "pt", **(metadata or {})})
        needed = len(header) + sum(tensor.num_bytes for tensor in plan)
        self._file = path.open("xb")
        try:
            os.posix_fallocate(self._file.fileno(), 0, needed)
            self._file.write(header)
        except OSError as error:
            self._file.close()
            raise OSError(error.errno, f"{error.strerror}: {path.name} takes {needed} bytes") from error

    def write(self, tensor: torch.Tensor) -> None:
        """Write the next planned tensor; its dtype and shape must be the planned ones."""
        planned = self._waiting.pop()
        assert (tensor.dtype, tuple(tensor.shape)) == (planned.dtype, planned.shape), planned.name
        kept = tensor.contiguous()  # alive until its bytes are written
        self._file.write(_octets(kept))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind or not self._waiting, "every planned tensor is written"


def _header(plan: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in plan:
        end = position + tensor.num_bytes
        table[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _octets(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor without a copy and without numpy, which is no runtime dependency.

    They do not keep the tensor alive.
    """
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * count).from_address(tensor.data_ptr())).cast("B")
