"""A GGUF file, mapped read-only: its metadata and its tensors, every length checked against the file's own size.

Versions 2 and 3, little-endian. Nothing is allocated on the word of a count: a count is first compared with the
bytes left. Source: ggml `docs/gguf.md`.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

import torch

from deepseek_tgi.convert.gguf_quants import GGML_TYPES, UNREADABLE_NAMES, GgmlType, dequantise
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_STRINGS = 1 << 22
"""Elements of one list of strings; the largest vocabularies have under 300,000 (merges: twice that)."""
_MAX_DIMS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Struct letters of the fixed-size value kinds."""

Value: TypeAlias = "int | float | bool | str | list[str] | array[int] | array[float]"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in torch's order (rows first), `offset` in bytes from the file's start."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """The checked contents of one file. `metadata` holds scalars, strings, lists of strings and `array`s of numbers."""

    def __init__(self, path: Path) -> None:
        """Map and check `path`. Raises `CheckpointError`; `UnsupportedModelError` for a format that is only known."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # A private writable mapping, since torch warns about read-only buffers; it is never written to.
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: is empty; expected a GGUF file") from error
        cursor = _Cursor(path, memoryview(self._map))
        num_tensors, num_keys = _read_head(cursor)
        self.metadata: Mapping[str, Value] = _read_metadata(cursor, num_keys)
        self.tensors: Mapping[str, GgufTensor] = _read_tensors(cursor, num_tensors, self._alignment())

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantised tensor, newly allocated in `dtype`."""
        entry = self.tensors[name]
        octets = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset)
        return dequantise(entry.kind, octets, dtype).view(entry.shape)

    def release(self) -> None:
        """Give the resident pages of the mapping back to the page cache."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20 or value & (value - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {value!r}; expected a power of two")
        return value


class _Cursor:
    """Reads forward through the mapping and never past its end."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.position = 0
        self._view = view

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: at byte {self.position}: {problem}")

    @property
    def left(self) -> int:
        return len(self._view) - self.position

    def take(self, count: int, what: str) -> memoryview:
        if count > self.left:
            self.fail(f"{what} takes {count} bytes but {self.left} are left: truncated, or not a GGUF file")
        start = self.position
        self.position += count
        return self._view[start : self.position]

    def number(self, letter: str, what: str) -> int | float | bool:
        layout = struct.Struct("<" + letter)
        value: int | float | bool = layout.unpack(self.take(layout.size, what))[0]
        return value

    def count(self, what: str, limit: int, letter: str = "Q") -> int:
        value = self.number(letter, what)
        assert isinstance(value, int)
        if value > limit:
            self.fail(f"{what} is {value}; expected at most {limit}")
        return value

    def text(self, what: str) -> str:
        length = self.count(f"length of {what}", self.left)
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")


def _read_head(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns the counts of tensors and keys."""
    magic = bytes(cursor.take(4, "the magic"))
    if magic != MAGIC:
        cursor.fail(f"magic is {magic!r}; expected {MAGIC!r}: not a GGUF file")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        raise UnsupportedModelError(f"{cursor.path}: GGUF version {version}; versions 2 and 3, little-endian, are read")
    num_tensors = cursor.count("the tensor count", _MAX_TENSORS)
    return num_tensors, cursor.count("the key count", _MAX_KEYS)


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.text("a metadata key")
        if key in metadata:
            cursor.fail(f"key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.count(f"value kind of {key}", 12, "I")
    if kind == _STRING:
        return cursor.text(key)
    if kind != _ARRAY:
        return cursor.number(_SCALARS[kind], key)
    element = cursor.count(f"element kind of {key}", 12, "I")
    if element == _ARRAY:
        cursor.fail(f"{key} is a list of lists; expected a list of numbers or strings")
    if element == _STRING:
        length = cursor.count(f"length of {key}", min(_MAX_STRINGS, cursor.left // 8))
        return [cursor.text(f"{key}[{index}]") for index in range(length)]
    letter = "B" if element == _BOOL else _SCALARS[element]
    width = struct.calcsize("<" + letter)
    values: array[int] | array[float] = array({"Q": "L", "q": "l"}.get(letter, letter))
    values.frombytes(cursor.take(cursor.count(f"length of {key}", cursor.left // width) * width, key))
    return values


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        entry = _read_tensor(cursor, alignment)
        if entry.name in tensors:
            cursor.fail(f"tensor {entry.name!r} appears twice")
        tensors[entry.name] = entry
    base = (cursor.position + alignment - 1) // alignment * alignment
    placed = {
        name: GgufTensor(name, entry.kind, entry.shape, base + entry.offset, entry.num_bytes)
        for name, entry in tensors.items()
    }
    _check_ranges(cursor, placed)
    return placed


def _read_tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """One table row; its offset still counts from the start of the data."""
    name = cursor.text("a tensor name")
    num_dims = cursor.count(f"rank of {name}", _MAX_DIMS, "I")
    shape = tuple(cursor.count(f"a size of {name}", 2**40) for _ in range(num_dims))[::-1]
    number = cursor.count(f"type of {name}", 2**32 - 1, "I")
    kind = GGML_TYPES.get(number)
    if kind is None:
        known = UNREADABLE_NAMES.get(number, f"number {number}")
        readable = ", ".join(kind.name for kind in GGML_TYPES.values())
        raise UnsupportedModelError(f"{cursor.path}: tensor {name} has type {known}; readable are {readable}")
    offset = cursor.count(f"offset of {name}", 2**63)
    values = 1
    for size in shape:
        values *= size
    if not shape or values == 0 or shape[-1] % kind.block_values:
        cursor.fail(f"tensor {name} has shape {list(shape)}; expected rows of whole {kind.block_values}-value blocks")
    if offset % alignment:
        cursor.fail(f"tensor {name} starts at offset {offset}; expected a multiple of {alignment}")
    return GgufTensor(name, kind, shape, offset, values // kind.block_values * kind.block_bytes)


def _check_ranges(cursor: _Cursor, tensors: Mapping[str, GgufTensor]) -> None:
    """Tensors lie inside the file and do not overlap; padding between them is allowed."""
    size = cursor.position + cursor.left
    end = cursor.position
    for entry in sorted(tensors.values(), key=lambda entry: entry.offset):
        if entry.offset < end:
            cursor.fail(f"tensor {entry.name} overlaps the one before it")
        end = entry.offset + entry.num_bytes
        if end > size:
            cursor.fail(f"tensor {entry.name} ends at byte {end} of {size}: truncated")
