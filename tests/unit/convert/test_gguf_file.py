"""The GGUF reader against the `gguf` package's writer, and against files that lie."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_tgi.convert.gguf_file import GgufFile
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint64("u64", 2**63)
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "Grüße ▁")
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    rows = np.arange(96, dtype=np.float32).reshape(3, 32) / 7
    writer.add_tensor("dense", rows)
    writer.add_tensor("half", rows[:1].astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("packed", gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_package_wrote(sample: Path) -> None:
    file = GgufFile(sample)
    read = dict(file.metadata)
    assert [read[key] for key in ("u8", "i8", "u64", "f32", "yes", "text")] == [200, -100, 2**63, 0.5, True, "Grüße ▁"]
    assert read["texts"] == ["a", "", "ü"]
    assert list(read["numbers"]) == [1, -2, 3]  # type: ignore[arg-type]
    assert list(read["floats"]) == [0.5, -1.5]  # type: ignore[arg-type]
    rows = torch.arange(96.0).view(3, 32) / 7
    assert torch.equal(file.tensor("dense"), rows)
    assert torch.equal(file.tensor("half", torch.float16), rows[:1].half())
    packed = next(tensor for tensor in gguf.GGUFReader(sample).tensors if tensor.name == "packed")
    expected = gguf.quants.dequantize(packed.data, packed.tensor_type)
    np.testing.assert_array_equal(file.tensor("packed").numpy(), expected)
    file.release()
    assert torch.equal(file.tensor("dense"), rows)


def head(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def row(name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def padded(content: bytes, data: bytes) -> bytes:
    return content + b"\0" * (-len(content) % 32) + data


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty; expected a GGUF file"),
    "not gguf": (b"PK\x03\x04" + b"\0" * 40, "not a GGUF file"),
    "cut in the head": (head()[:10], "truncated"),
    "tensor count": (head(tensors=2**64 - 1), "tensor count is"),
    "key count": (head(keys=2**40), "key count is"),
    "key longer than the file": (head(keys=1) + struct.pack("<Q", 2**60) + b"k", "length of a metadata key is"),
    "string longer than the file": (head(keys=1) + key(b"k", 8, struct.pack("<Q", 2**50)), "length of k is"),
    "unknown value kind": (head(keys=1) + key(b"k", 77, b""), "value kind of k is 77"),
    "list of lists": (head(keys=1) + key(b"k", 9, struct.pack("<IQ", 9, 1)), "list of lists"),
    "list longer than the file": (head(keys=1) + key(b"k", 9, struct.pack("<IQ", 4, 2**61)), "length of k is"),
    "strings longer than the file": (head(keys=1) + key(b"k", 9, struct.pack("<IQ", 8, 2**40)), "length of k is"),
    "invalid utf-8": (head(keys=1) + key(b"k", 8, text(b"\xff")), "k is not UTF-8"),
    "key twice": (head(keys=2) + key(b"k", 7, b"\1") * 2, "'k' appears twice"),
    "alignment of three": (head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 3)), "power of two"),
    "alignment of zero": (head(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 0)), "power of two"),
    "rank of five": (head(tensors=1) + row(dims=(1,) * 5), "rank of t is 5"),
    "no dimension": (head(tensors=1) + row(dims=()), "shape"),
    "size of zero": (head(tensors=1) + row(dims=(0,)), "shape"),
    "sizes that overflow": (padded(head(tensors=1) + row(dims=(2**40,) * 4), b""), "truncated"),
    "half a block": (head(tensors=1) + row(dims=(16,), kind=2), "whole 32-value blocks"),
    "odd offset": (head(tensors=1) + row(offset=5), "multiple of 32"),
    "offset past the file": (padded(head(tensors=1) + row(offset=2**40), b"\0" * 128), "truncated"),
    "data cut short": (padded(head(tensors=1) + row(), b"\0" * 127), "truncated"),
    "overlap": (padded(head(tensors=2) + row(b"a") + row(b"b", offset=96), b"\0" * 256), "overlaps"),
    "name twice": (padded(head(tensors=2) + row(b"a") + row(b"a", offset=128), b"\0" * 256), "'a' appears twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_clear_error(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (head(version=1), "GGUF version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "little-endian"),
        (head(tensors=1) + row(kind=16), "type IQ2_XXS; readable are F32, F16, Q4_0"),
        (head(tensors=1) + row(kind=4), "type number 4; readable"),
    ],
)
def test_what_is_only_known_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        GgufFile(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read: No such file or directory$"):
        GgufFile(tmp_path / "none.gguf")


def read_everything(path: Path) -> None:
    file = GgufFile(path)
    for name in file.tensors:
        file.tensor(name)


def flip(octets: bytearray, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
    for _ in range(draw(st.integers(1, 4))):
        octets[draw(st.integers(0, min(len(octets), 700) - 1))] = draw(st.integers(0, 255))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_file_reads_or_is_refused(data: st.DataObject, sample: Path, tmp_path: Path) -> None:
    octets = bytearray(sample.read_bytes())
    flip(octets, data.draw)
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(octets[: data.draw(st.integers(0, len(octets)))]))
    with contextlib.suppress(CheckpointError):
        read_everything(path)
