"""Which INT4 kernel is chosen: measured tables first, a rule after, and never one that cannot run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from deepseek_tgi import cli
from deepseek_tgi.errors import ConfigError, ResourceError
from deepseek_tgi.kernels.int4_linear import choice, layout, stream, tune, wide
from deepseek_tgi.kernels.int4_linear.choice import Chooser, Table, read_table, write_table
from deepseek_tgi.kernels.int4_linear.panel import PanelShape
from deepseek_tgi.kernels.int4_linear.stream import StreamShape
from deepseek_tgi.kernels.int4_linear.wide import WideShape

FEW, MANY = StreamShape(split=2, depth=3, warps=4), PanelShape(tokens=64, warpgroups=1, stages=3)


def weight(n: int = 64, k: int = 512, group_size: int = 128) -> layout.CudaInt4:
    codes = torch.zeros(n, k, dtype=torch.uint8)
    zeros, scales = torch.zeros(n, k // group_size, dtype=torch.uint8), torch.ones(n, k // group_size)
    return layout.pack(codes, zeros, scales, group_size)


def on_meta(size: tuple[int, int, int]) -> layout.CudaInt4:
    """A weight of some size, without its memory."""
    n, k, group = size
    tiles = -(-n // 64) * 4
    metas = torch.empty(tiles, k // group, 8, 2, 1, dtype=torch.int32, device="meta")
    return layout.CudaInt4(torch.empty(tiles, k // 64, 32, 4, device="meta"), metas, size, 1)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    weights: dict[str, dict[int, choice.Choice]] = {"64x512g128": {1: FEW, 64: MANY, 256: WideShape(), 4096: None}}
    write_table(tmp_path / "t.json", weights, {"gpu": "one"})
    read = read_table(tmp_path / "t.json")
    assert read is not None
    assert read.weights == weights


def test_no_table_is_no_error_and_a_broken_one_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_table(tmp_path / "none.json") is None
    assert not caplog.records
    for content in ("{", "[]", '{"weights": []}', '{"weights": {"a": {"x": {}}}}', '{"weights": {"a": {"1": 7}}}'):
        caplog.clear()
        (tmp_path / "bad.json").write_text(content)
        assert read_table(tmp_path / "bad.json") is None
        assert "bad.json" in caplog.text


def test_entries_of_another_version_are_left_out(tmp_path: Path) -> None:
    write_table(tmp_path / "t.json", {"64x512g128": {1: FEW, 64: MANY}}, {})
    content = json.loads((tmp_path / "t.json").read_text())
    content["weights"]["64x512g128"]["64"]["tokens"] = 7
    content["weights"]["64x512g128"]["8"] = {"kernel": "other"}
    content["weights"]["64x512g128"]["16"] = {"kernel": "stream", "width": 3}
    (tmp_path / "t.json").write_text(json.dumps(content))
    read = read_table(tmp_path / "t.json")
    assert read is not None
    assert read.weights == {"64x512g128": {1: FEW}}


@pytest.mark.parametrize(
    "entry",
    [
        {"kernel": "stream", "split": 0},
        {"kernel": "stream", "warps": 0},
        {"kernel": "stream", "warps": 64},
        {"kernel": "stream", "cluster": 16},
        {"kernel": "stream", "row_tiles": 0},
        {"kernel": "stream", "blocks": 0},
        {"kernel": "panel", "warpgroups": 0},
        {"kernel": "panel", "warpgroups": 9},
        {"kernel": "panel", "cluster": 0},
        {"kernel": "panel", "cluster": 16},
        {"kernel": "wide", "sharers": 0},
        {"kernel": "wide", "sharers": -1},
        {"kernel": "wide", "cluster": 0},
        {"kernel": "wide", "cluster": 3},
        {"kernel": "wide", "warpgroups": 0},
    ],
    ids=str,
)
def test_shapes_that_are_none_are_left_out(entry: dict[str, int | str], tmp_path: Path) -> None:
    """No block is so large or so small on any GPU; a table is a file, and a server is not to end over it."""
    steps = {"1": {"kernel": "dequantise"}, "8": entry}
    (tmp_path / "t.json").write_text(json.dumps({"weights": {"64x512g128": steps}}))
    read = read_table(tmp_path / "t.json")
    assert read is not None
    assert read.weights == {"64x512g128": {1: None}}


def test_a_measured_number_of_rows_stands_for_those_below_it() -> None:
    chooser = Chooser((Table("t", {"64x512g128": {8: FEW, 64: MANY, 4096: None}}),), 3, 90)
    assert chooser.choice(weight(), 5) == FEW
    assert chooser.choice(weight(), 8) == FEW
    assert chooser.choice(weight(), 50) == MANY
    assert chooser.choice(weight(), 9000) is None
    few_alone = Chooser((Table("t", {"64x512g128": {8: FEW}}),), 3, 90)
    assert few_alone.choice(weight(), 8) == FEW
    assert few_alone.choice(weight(), 30) != FEW


def test_the_first_table_that_knows_decides() -> None:
    other = StreamShape(split=1, depth=4, warps=2)
    first, second = Table("a", {"64x512g128": {1: other}}), Table("b", {"64x512g128": {1: FEW, 8: FEW}})
    chooser = Chooser((first, second), 3, 90)
    assert chooser.choice(weight(), 1) == other
    assert chooser.choice(weight(), 7) == FEW


def test_what_cannot_run_is_passed_over() -> None:
    clusters = StreamShape(split=1, depth=3, cluster=2, warps=4)
    huge = StreamShape(split=1, depth=64, warps=16)
    for shape, capability in ((clusters, 80), (huge, 90), (MANY, 80)):
        chooser = Chooser((Table("t", {"64x512g128": {1: shape}}),), 3, capability)
        chosen = chooser.choice(weight(), 1)
        assert chosen != shape
        assert choice.runs(chosen, 1, weight(), capability)


def test_a_weight_nobody_measured_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    chooser = Chooser((), 3, 90)
    with caplog.at_level(logging.INFO):
        for rows in (1, 2, 1, 40):
            chooser.choice(weight(), rows)
    assert [record.getMessage() for record in caplog.records] == [
        "INT4 weight 64x512g128: not measured on this GPU, kernels are chosen by rule (deepseek-tgi tune measures)"
    ]


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32], ids=lambda m: f"M{m}")
@pytest.mark.parametrize(
    "size", [(28672, 4096, 128), (4096, 14336, 128), (4608, 3584, 128), (64, 64, 32), (16, 128, 128)], ids=str
)
def test_the_rule_finds_a_shape_for_few_rows_that_fits(size: tuple[int, int, int], rows: int) -> None:
    packed = on_meta(size)
    tried = stream.candidates(packed, rows, 132, 90)
    assert all(stream.fits(shape, rows, packed, 90) for shape in tried)
    assert tried


MOST_SHARED = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of a block by capability: CUDA programming guide, technical specifications."""


@pytest.mark.parametrize("capability", MOST_SHARED, ids=lambda c: f"sm_{c}")
@pytest.mark.parametrize("size", [(6144, 4096, 128), (4096, 14336, 128), (37888, 3584, 128), (3648, 2048, 64)], ids=str)
def test_no_kernel_is_chosen_that_the_gpu_has_no_shared_memory_for(size: tuple[int, int, int], capability: int) -> None:
    packed = on_meta(size)
    for rows in (1, 2, 4, 8, 9, 16, 32):
        shape = Chooser((), 58, capability).choice(packed, rows)
        if rows <= 2:
            assert isinstance(shape, StreamShape)
        if isinstance(shape, StreamShape):
            call = stream.StreamCall(packed.group, packed.scale_kind, x_bf16=False, out_bf16=True, norm=rows <= 4)
            room = stream.shared_bytes(shape, call, rows, stream.stages_of(packed))
            assert room <= MOST_SHARED[capability], (rows, shape)


@pytest.mark.parametrize("rows", [129, 300, 1024], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("n", [64, 6144, 28672], ids=lambda n: f"N{n}")
def test_the_rule_takes_panels_that_the_copy_engine_brings_for_many_rows(n: int, rows: int) -> None:
    packed = on_meta((n, 4096, 128))
    shapes = wide.default_shapes(packed, rows, 132)
    assert all(wide.fits(shape, packed, 90) for shape in shapes)
    assert Chooser((), 132, 90).choice(packed, rows) == shapes[0]
    assert not isinstance(Chooser((), 132, 80).choice(packed, rows), WideShape)


def test_no_block_of_a_cluster_is_left_without_work() -> None:
    three_groups = weight(k=384)
    assert wide.fits(WideShape(16, 1, 3, cluster=2), three_groups, 90)
    assert not wide.fits(WideShape(16, 1, 3, cluster=4), three_groups, 90)


def test_shapes_on_the_command_line() -> None:
    assert tune.parse("28672x4096") == tune.Wanted(28672, 4096, 128)
    assert tune.parse("64x96g32") == tune.Wanted(64, 96, 32)
    for text in ("28672", "0x4096", "64x100", "64x96g48x", "64x96g24"):
        with pytest.raises(ConfigError, match="weight"):
            tune.parse(text)
    assert tune.parse_rows("8,1,8") == (1, 8)
    assert tune.parse_rows(None) == choice.ROWS
    for text in ("3", "1,,8", "x"):
        with pytest.raises(ConfigError, match="rows"):
            tune.parse_rows(text)


def test_tuning_without_a_gpu_or_without_weights_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--weight", "64x128", "--device", "cpu"]) == 2
    assert "expected an NVIDIA GPU" in capsys.readouterr().err
    assert cli.main(["tune"]) == 2
    assert "no INT4 weight to measure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weight", "64x128", "--device", "banana"], "device: got 'banana', expected auto, cpu, cuda or cuda:N"),
        (["--weight", "64x128", "--device", "cuda:999"], "device: got cuda:999 for 1 rank, and torch"),
        (["--model-id", "demo", "--num-shard", "0"], "num_shard: got 0, expected at least 1"),
        (["--model-id", "demo", "--num-shard", "-1"], "num_shard: got -1, expected at least 1"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_tuned_is_refused_by_name(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_table_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"file/t\.json: cannot be written: "):
        write_table(tmp_path / "file" / "t.json", {}, {})


def test_shipped_tables_read() -> None:
    for path in choice.SHIPPED.glob("*.json"):
        table = read_table(path)
        assert table is not None, path
        assert all(set(steps) <= set(choice.ROWS) for steps in table.weights.values())
