"""Mapped checkpoints: what is read, what is refused, and that neither hostile nor damaged files do harm."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepseek_tgi.adapters.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from deepseek_tgi.adapters.safetensors_file import DTYPES, SafetensorsFile
from deepseek_tgi.errors import CheckpointError

Header = dict[str, Any]


def write_raw(path: Path, header: Header | bytes, data: bytes, length: int | None = None) -> Path:
    """A safetensors file with exactly this header and data, whatever they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def sharded(folder: Path) -> Path:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.full((2, 2), 7.0)}, folder / "model-00002-of-00002.safetensors")
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(folder, {"a": one, "b": one, "c": two})
    return folder


def test_every_dtype_reads_as_the_published_library_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    octets = torch.randint(0, 256, (48,), dtype=torch.uint8)
    tensors = {name: octets.clone().view(dtype) for name, dtype in DTYPES.items() if name != "BOOL"}
    tensors |= {"BOOL": torch.tensor([True, False]), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / SINGLE_FILE)
    checkpoint, theirs = Checkpoint(tmp_path), load_file(tmp_path / SINGLE_FILE)
    assert set(checkpoint.names()) == set(theirs)
    for name, expected in theirs.items():
        got = checkpoint.tensor(name)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_tensors_are_views_and_survive_a_release(tmp_path: Path) -> None:
    save_file({"a": torch.arange(1000.0)}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    first, second = checkpoint.tensor("a"), checkpoint.tensor("a")
    assert first.data_ptr() == second.data_ptr()
    checkpoint.release()
    assert torch.equal(first, torch.arange(1000.0))


def test_a_misaligned_tensor_is_copied_into_line(tmp_path: Path) -> None:
    header = {"x": entry("U8", [1], [0, 1]), "y": entry("F32", [1], [1, 5])}
    write_raw(tmp_path / SINGLE_FILE, header, b"\x07" + struct.pack("<f", 2.5))
    tensor = Checkpoint(tmp_path).tensor("y")
    assert tensor.tolist() == [2.5]
    assert tensor.data_ptr() % 4 == 0


def test_several_files_are_one_checkpoint_with_or_without_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    for _ in range(2):
        checkpoint = Checkpoint(tmp_path)
        assert sorted(checkpoint.names()) == ["a", "b", "c"]
        assert checkpoint.tensor("c", (2, 2)).tolist() == [[7.0, 7.0], [7.0, 7.0]]
        (tmp_path / INDEX_FILE).unlink(missing_ok=True)


def drop_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def drop_shard_and_index(folder: Path) -> None:
    drop_shard(folder)
    (folder / INDEX_FILE).unlink()


def duplicate(folder: Path) -> None:
    save_file({"a": torch.ones(2), "c": torch.ones(2)}, folder / "model-00002-of-00002.safetensors")


def misplace(folder: Path) -> None:
    write_index(folder, {"c": "model-00001-of-00002.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_shard, r"model-00002-of-00002.safetensors: not there, or no file"),
        (drop_shard_and_index, "1 of 00002 files model-"),
        (duplicate, "tensor a is in both"),
        (misplace, "places c in model-00001-of-00002.safetensors, which does not hold it"),
        (lambda folder: write_index(folder, {}), "weight_map is missing or empty"),
        (lambda folder: write_index(folder, ["a"]), "weight_map is"),
        (lambda folder: write_index(folder, {"a": 3}), "expected a .safetensors file beside it"),
        (lambda folder: write_index(folder, {"a": "../secret.safetensors"}), "expected a .safetensors file beside it"),
        (lambda folder: write_index(folder, {"a": "/etc/passwd"}), "expected a .safetensors file beside it"),
        (lambda folder: write_index(folder, {"a": "sub/x.safetensors"}), "expected a .safetensors file beside it"),
        (lambda folder: write_index(folder, {"a": "x\0.safetensors"}), "expected a .safetensors file beside it"),
        (lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": {"a": "x", "a": "y"}}'), "appears twice"),
    ],
)
def test_an_inconsistent_set_of_files_is_refused(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    damage(sharded(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "a pickle file"),
        ("model.pt", "a pickle file"),
        ("x.gguf", "deepseek-tgi import-gguf"),
        ("README.md", "expected model.safetensors"),
    ],
)
def test_a_folder_without_safetensors_says_what_would_work(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


HOSTILE: dict[str, tuple[Header | bytes, bytes, int | None, str]] = {
    "length past the file": ({}, b"", 1 << 20, "truncated, or not safetensors"),
    "length of the whole address space": ({}, b"", 2**64 - 1, "the limit is"),
    "header is a list": (b"[]", b"", None, "expected an object"),
    "header is no JSON": (b"{\xff}", b"", None, "not valid JSON"),
    "header is nested deeply": (b'{"a":' * 50_000, b"", None, "not valid JSON"),
    "name twice": (b'{"a":{},"a":{}}', b"", None, "appears twice"),
    "entry is no object": ({"a": 1}, b"", None, "expected an object of dtype"),
    "entry lacks a key": ({"a": {"dtype": "F32"}}, b"", None, "expected an object of dtype"),
    "unknown dtype": ({"a": entry("F7")}, b"\0" * 8, None, "has dtype F7; expected one of BOOL"),
    "dtype is a list": ({"a": {**entry(), "dtype": ["F32"]}}, b"\0" * 8, None, "has dtype"),
    "negative size": ({"a": entry(shape=[-2])}, b"\0" * 8, None, "non-negative"),
    "size is a float": ({"a": entry(shape=[2.0])}, b"\0" * 8, None, "non-negative"),
    "size is a truth": ({"a": entry(shape=[True])}, b"\0" * 8, None, "non-negative"),
    "rank of a thousand": ({"a": entry(shape=[1] * 1000)}, b"\0" * 8, None, "at most 16"),
    "product overflows": ({"a": entry(shape=[2**40, 2**40])}, b"\0" * 8, None, "spans 8 bytes"),
    "offsets backwards": ({"a": entry(offsets=[8, 0])}, b"\0" * 8, None, r"expected \[start, end\]"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, b"\0" * 8, None, r"expected \[start, end\]"),
    "span of another size": ({"a": entry(offsets=[0, 4])}, b"\0" * 4, None, "spans 4 bytes"),
    "hole": ({"a": entry(offsets=[4, 12])}, b"\0" * 12, None, "leaves a hole"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12, None, "overlaps"),
    "data cut short": ({"a": entry()}, b"\0" * 7, None, "truncated"),
    "data left over": ({"a": entry()}, b"\0" * 9, None, "bytes left over"),
    "metadata is a string": ({"__metadata__": "x"}, b"", None, "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_one_clear_error(case: str, tmp_path: Path) -> None:
    header, data, length, message = HOSTILE[case]
    path = write_raw(tmp_path / SINGLE_FILE, header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"", b"\x01", b"\0" * 8, b"\0" * 7])
def test_a_file_too_short_for_a_header_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_byte_reads_as_before_or_is_refused(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.int8)}, path)
    octets = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(octets[: data.draw(st.integers(0, len(octets)))]))
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name, found in file.entries.items():
        assert file.tensor(name).numel() * found.dtype.itemsize == found.num_bytes


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        JSON_VALUES
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from([*DTYPES, "F4"]) | JSON_VALUES,
                "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON_VALUES,
                "data_offsets": st.lists(st.integers(-1, 24), max_size=3) | JSON_VALUES,
            }
        ),
        max_size=3,
    ),
    size=st.integers(0, 24),
)
def test_any_json_header_reads_or_is_refused(header: Header, size: int, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, bytes(size))
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    assert sum(found.num_bytes for found in file.entries.values()) == size
    for name in file.entries:
        file.tensor(name)


def test_missing_tensors_are_all_named_with_a_near_name(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"nearest unused name is model\.norm\.weight"):
        checkpoint.tensor("model.norms.weight")
    with pytest.raises(CheckpointError, match="7 tensors x0, x1, x2, x3, x4 and 2 more not in the checkpoint"):
        checkpoint.require([f"x{n}" for n in range(7)])


def test_shape_and_dtype_disagreements_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[2, 3\]; expected \[3, 2\]"):
        checkpoint.tensor("a", (3, 2))
    with pytest.raises(CheckpointError, match="tensor a has dtype float32; expected float16 or bfloat16"):
        checkpoint.tensor("a", None, (torch.float16, torch.bfloat16))


def test_unknown_tensors_are_one_line_and_derived_or_skipped_ones_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["used", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.2.x", "unknown.1", "unknown.2"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.tensor("used")
    checkpoint.skip(["model.layers.2.x", "absent"], "a next-token-prediction layer")
    assert checkpoint.unused() == ["unknown.1", "unknown.2"]
    with caplog.at_level(logging.WARNING):
        checkpoint.finish()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: ignored 2 tensors unknown.1, unknown.2: no part of this model has that name"
    ]


def resident_file_kb() -> int:
    """Resident file-backed memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssFile:")).split()[1])


def test_releasing_gives_mapped_memory_back(tmp_path: Path) -> None:
    with (tmp_path / SINGLE_FILE).open("wb") as file:
        header = json.dumps({"a": entry("U8", [64 << 20], [0, 64 << 20])}).encode()
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (64 << 20))
    checkpoint = Checkpoint(tmp_path)
    before = resident_file_kb()
    assert checkpoint.tensor("a").sum().item() == 0
    grown = resident_file_kb() - before
    checkpoint.release()
    left = resident_file_kb() - before
    assert grown > 60 << 10
    assert left < 4 << 10
