"""Quantising to AWQ: what is written, held to the format oracle and to the arithmetic of rounding."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
import torch
from oracles import awq as oracle
from safetensors.torch import load_file, save_file

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.quantization import resolve
from deepseek_tgi.convert.quantize import quantize_rtn
from deepseek_tgi.convert.rtn import quantise_matrix
from deepseek_tgi.errors import CheckpointError, ConfigError, ResourceError

Tensors = dict[str, torch.Tensor]
PROJECTIONS = {
    "self_attn.q_proj": ("hidden", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "hidden"),
    "mlp.gate_proj": ("inner", "hidden"),
    "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
}


def dense_model(
    folder: Path, hidden: int = 128, inner: int = 384, dtype: torch.dtype = torch.float16, **over: Any
) -> Tensors:
    """A dense checkpoint of one layer with random weights, some far out."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        "max_position_embeddings": 64,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **over,
    }
    torch.manual_seed(0)
    sizes = {"hidden": hidden, "inner": inner, "kv": hidden // 2}
    tensors = {
        f"model.layers.0.{name}.weight": torch.randn(sizes[rows], sizes[columns]) * 0.02
        for name, (rows, columns) in PROJECTIONS.items()
    }
    tensors["model.layers.0.mlp.down_proj.weight"][3, 7] = 2.0
    tensors["model.layers.0.mlp.up_proj.weight"][0] = 0.0
    tensors["model.layers.0.self_attn.o_proj.weight"].abs_().add_(0.5)
    tensors |= {
        f"model.layers.0.{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")
    }
    tensors |= {"model.norm.weight": torch.ones(hidden), "model.embed_tokens.weight": torch.randn(16, hidden)}
    tensors |= {
        "lm_head.weight": torch.randn(16, hidden),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Path]:
    work = tmp_path_factory.mktemp("quantise")
    dense = dense_model(work / "dense")
    quantize_rtn(work / "dense", work / "awq")
    return dense, work / "awq"


def test_config_is_autoawqs(written: tuple[Tensors, Path]) -> None:
    _, folder = written
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    assert (config["torch_dtype"], config["hidden_size"]) == ("float16", 128)


def test_what_is_not_a_decoder_layer_stays_as_it_was(written: tuple[Tensors, Path]) -> None:
    dense, folder = written
    stored = load_file(folder / "model.safetensors")
    kept = {name for name in dense if "_proj" not in name and "rotary" not in name}
    assert {name for name in stored if name.endswith(".weight")} == kept
    for name in kept:
        assert torch.equal(stored[name], dense[name])
    assert (folder / "tokenizer.json").read_text() == '{"made": "up"}'
    assert (folder / "chat_template.jinja").is_file()


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_the_published_unpacking_reads_the_nearest_levels(projection: str, written: tuple[Tensors, Path]) -> None:
    dense, folder = written
    module = f"model.layers.0.{projection}"
    stored = load_file(folder / "model.safetensors")
    packed = {name: stored[f"{module}.{name}"].numpy() for name in ("qweight", "qzeros", "scales")}
    assert [str(array.dtype) for array in packed.values()] == ["int32", "int32", "float16"]
    got = oracle.read_gemm(**packed, group_size=128)
    wanted = dense[f"{module}.weight"].float().numpy()
    scales = np.repeat(packed["scales"].astype(np.float32).T, 128, axis=1)
    zeros = np.repeat(oracle._unpack_last_axis(packed["qzeros"], oracle.GEMM_ORDER).T, 128, axis=1)
    nearest = np.clip(np.round(wanted / scales) + zeros, 0, 15) - zeros
    np.testing.assert_array_equal(got, nearest.astype(np.float32) * scales)
    # The range covers every weight but for the rounding of the zero point: at most one step is lost at its ends.
    assert (np.abs(got - wanted) <= scales * 1.001).all()


def test_our_own_loader_reads_the_same(written: tuple[Tensors, Path]) -> None:
    _, folder = written
    stored = load_file(folder / "model.safetensors")
    plan = resolve(read_model_config(folder), Checkpoint(folder))
    module = "model.layers.0.mlp.down_proj"
    packed = {name: stored[f"{module}.{name}"].numpy() for name in ("qweight", "qzeros", "scales")}
    got = plan.linear(module, 128, 384).dequantise().numpy()
    np.testing.assert_array_equal(got, oracle.read_gemm(**packed, group_size=128))


@pytest.mark.parametrize(
    ("inner", "asked", "size"), [(384, None, 128), (192, None, 64), (96, None, 32), (384, 32, 32), (200, -1, -1)]
)
def test_group_size_is_the_largest_that_fits_or_the_one_asked(
    inner: int, asked: int | None, size: int, tmp_path: Path
) -> None:
    dense_model(tmp_path / "dense", inner=inner)
    quantize_rtn(tmp_path / "dense", tmp_path / "awq", asked)
    assert json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]["group_size"] == size
    down = "model.layers.0.mlp.down_proj.scales"
    groups = 1 if size == -1 else inner // size
    assert load_file(tmp_path / "awq" / "model.safetensors")[down].shape == (groups, 128)


@pytest.mark.parametrize(
    ("inner", "asked", "message"),
    [
        (96, 64, r"group size 64 does not divide the input side of model\.layers\.0\.mlp\.down_proj\.weight, 96"),
        (200, None, r"no group size of 128, 64, 32 divides the input side of .*, 200; give --group-size"),
        (384, 0, "group size is 0; expected -1 or a positive number"),
        (384, -8, "group size is -8"),
    ],
)
def test_a_group_size_that_does_not_fit_is_refused(inner: int, asked: int | None, message: str, tmp_path: Path) -> None:
    dense_model(tmp_path / "dense", inner=inner)
    with pytest.raises(ConfigError, match=message):
        quantize_rtn(tmp_path / "dense", tmp_path / "awq", asked)
    assert os.listdir(tmp_path) == ["dense"]


def test_outputs_that_do_not_fill_words_stay_dense_and_are_listed(tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense")
    name = "model.layers.0.self_attn.k_proj.weight"
    dense[name] = torch.randn(12, 128).half()
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    quantize_rtn(tmp_path / "dense", tmp_path / "awq")
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["model.layers.0.self_attn.k_proj"]
    assert torch.equal(load_file(tmp_path / "awq" / "model.safetensors")[name], dense[name])


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_dense_parts_keep_half_precision_of_their_kind(source: torch.dtype, tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense", dtype=source)
    quantize_rtn(tmp_path / "dense", tmp_path / "awq")
    stored = load_file(tmp_path / "awq" / "model.safetensors")
    expected = torch.bfloat16 if source == torch.bfloat16 else torch.float16
    assert torch.equal(stored["lm_head.weight"], dense["lm_head.weight"].to(expected))
    assert stored["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16
    stated = json.loads((tmp_path / "awq" / "config.json").read_text())["torch_dtype"]
    assert stated == str(expected).removeprefix("torch.")


def test_a_tied_head_is_not_stored_again(tmp_path: Path) -> None:
    dense_model(tmp_path / "dense", tie_word_embeddings=True)
    quantize_rtn(tmp_path / "dense", tmp_path / "awq")
    assert "lm_head.weight" not in load_file(tmp_path / "awq" / "model.safetensors")


def test_what_is_quantised_already_is_refused(written: tuple[Tensors, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is quantised already \(awq\)"):
        quantize_rtn(written[1], tmp_path / "twice")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named_and_leave_nothing(value: float, tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense")
    dense["model.layers.0.mlp.up_proj.weight"][5, 5] = value
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight holds infinities, NaN"):
        quantize_rtn(tmp_path / "dense", tmp_path / "awq")
    assert os.listdir(tmp_path) == ["dense"]


def test_a_copied_value_that_float16_cannot_hold_is_refused_not_stored_as_infinity(tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense", dtype=torch.float32)
    dense["model.norm.weight"][3] = 1e5
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds infinities, NaN or values beyond float16"):
        quantize_rtn(tmp_path / "dense", tmp_path / "awq")
    assert os.listdir(tmp_path) == ["dense"]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The system's own refusal to write more, as a disk that fills up gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_running_out_of_room_leaves_nothing(tmp_path: Path) -> None:
    dense_model(tmp_path / "dense")
    with file_size_limit(20_000), pytest.raises(ResourceError, match="awq: the disk is full"):
        quantize_rtn(tmp_path / "dense", tmp_path / "awq")
    assert os.listdir(tmp_path) == ["dense"]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    dense_model(tmp_path / "dense")
    with pytest.raises(ConfigError, match="exists already"):
        quantize_rtn(tmp_path / "dense", tmp_path / "dense")


@pytest.mark.parametrize("rows", [1, 7])
def test_pieces_of_a_matrix_give_what_the_whole_gives(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    weight = torch.randn(15, 64)
    whole = quantise_matrix(weight, 32)
    monkeypatch.setattr("deepseek_tgi.convert.rtn._WEIGHTS_AT_ONCE", rows * 64)
    pieces = quantise_matrix(weight, 32)
    for name in ("codes", "zeros", "scales"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))


@pytest.mark.parametrize("fill", [0.0, 0.3, -0.3, 1e-9, 3e4])
def test_constant_groups_survive(fill: float) -> None:
    weight = torch.full((2, 64), fill)
    got = quantise_matrix(weight, 32)
    assert torch.isfinite(got.scales).all()
    assert ((got.dequantise() - weight).abs() <= max(abs(fill) * 1e-3, 2**-24)).all()


def test_routers_and_correction_biases_keep_their_numbers(tmp_path: Path) -> None:
    builders.tiny_checkpoint(tmp_path / "dense", "deepseek_v3", dtype=torch.float32)
    quantize_rtn(tmp_path / "dense", tmp_path / "awq")
    before = {n: t for path in (tmp_path / "dense").glob("*.safetensors") for n, t in load_file(path).items()}
    after = load_file(tmp_path / "awq" / "model.safetensors")
    routers = [name for name in before if ".mlp.gate." in name]
    assert routers
    for name in routers:
        assert torch.equal(after[name].float(), before[name].to(after[name].dtype).float())
        assert after[name].dtype == (torch.float32 if name.endswith("correction_bias") else torch.float16)
    assert any(".experts." in name and name.endswith(".qweight") for name in after)
