"""One safetensors file, mapped read-only, whose header is distrusted.

Choice: the header is parsed and checked here and the file is mapped with `mmap`. It prevents allocation on the word
of a hostile header, lets errors name file and tensor, and lets pages already copied be dropped from resident memory
(`release`). Rejected: `safetensors.safe_open`, which maps too but names no tensor in its errors and keeps the mapping
to itself.

Source: the safetensors format description (8-byte little-endian header length, JSON header, byte buffer).
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deepseek_tgi.adapters.json_fields import parse_json, shown
from deepseek_tgi.errors import CheckpointError

MAX_HEADER_BYTES = 64 * 2**20
"""Refused above: the largest public checkpoints have headers near 12 MB."""
_MAX_RANK = 16
_LENGTH_BYTES = 8
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `offset` counts from the start of the file, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """A mapped file and its checked table of tensors. Tensors keep the mapping alive; nobody may write to them."""

    def __init__(self, path: Path) -> None:
        """Map `path`. Raises `CheckpointError` naming file, tensor, got and expected."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                data_start = _read_data_start(file.read(_LENGTH_BYTES), size, path)
                header = file.read(data_start - _LENGTH_BYTES)
                # A private writable mapping, since torch warns about read-only buffers; it is never written to.
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped: {error}") from error
        self.num_bytes = size
        self.entries: Mapping[str, TensorEntry] = _read_entries(header, path, data_start, size)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as a view of the mapping (a copy only if the file misaligns it for its dtype).

        Raises `CheckpointError` if the file has been cut short: to read what is gone would end the process.
        """
        entry = self.entries[name]
        if (size := self._map.size()) < self.num_bytes:
            raise CheckpointError(f"{self.path}: was cut to {size} bytes while it was read; it had {self.num_bytes}")
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        octets = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset)
        if entry.offset % entry.dtype.itemsize:
            octets = octets.clone()
        return octets.view(entry.dtype).view(entry.shape)

    def release(self) -> None:
        """Give the resident pages of the mapping back to the page cache; views stay valid and re-read on use."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_data_start(prefix: bytes, size: int, path: Path) -> int:
    """Offset of the byte buffer, after checking the declared header length against the real file."""
    if len(prefix) < _LENGTH_BYTES:
        raise CheckpointError(f"{path}: {size} bytes long; a safetensors file has at least {_LENGTH_BYTES + 2}")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: declares a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
    if _LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{path}: declares a header of {length} bytes but is {size} bytes long: truncated, or not safetensors"
        )
    return _LENGTH_BYTES + length


def _read_entries(header: bytes, path: Path, data_start: int, size: int) -> dict[str, TensorEntry]:
    table = parse_json(header, f"{path} (header)", unique_keys=True)
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ is {shown(metadata)}; expected an object")
    entries = {name: _read_entry(name, item, path, data_start) for name, item in table.items()}
    _check_cover(entries, path, data_start, size)
    return entries


def _read_entry(name: str, item: object, path: Path, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(item, dict) or not {"dtype", "shape", "data_offsets"} <= item.keys():
        raise CheckpointError(f"{where} is {shown(item)}; expected an object of dtype, shape and data_offsets")
    dtype_name, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(f"{where} has dtype {shown(dtype_name)}; expected one of {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(f"{where} has shape {shown(shape)}; expected at most {_MAX_RANK} non-negative integers")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {shown(offsets)}; expected [start, end]")
    needed = math.prod(shape) * DTYPES[dtype_name].itemsize
    start, end = offsets
    if end - start != needed:
        raise CheckpointError(
            f"{where} spans {end - start} bytes; {dtype_name} of shape {shown(shape)} takes {shown(needed)}"
        )
    return TensorEntry(DTYPES[dtype_name], tuple(shape), data_start + start, needed)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _check_cover(entries: Mapping[str, TensorEntry], path: Path, data_start: int, size: int) -> None:
    """Tensors must fill the buffer from end to end: no hole, no overlap, nothing past the file."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].offset, pair[1].num_bytes)):
        if entry.offset != position:
            kind = "overlaps the one before it" if entry.offset < position else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: tensor {shown(name)} starts at byte {entry.offset}, which {kind}; expected {position}"
            )
        position += entry.num_bytes
    if position != size:
        kind = "truncated" if position > size else "bytes left over"
        raise CheckpointError(f"{path}: {size} bytes long but its tensors end at byte {position}: {kind}")
