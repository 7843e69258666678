"""Which layers are packed, in which dialect, and every way in which config and tensors can disagree."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import awq as oracle
from safetensors.torch import save_file

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.quantization import QuantPlan, resolve
from deepseek_tgi.adapters.weight_forms import DenseWeight, Int4Weight
from deepseek_tgi.errors import CheckpointError, DeepseekTgiError, UnsupportedModelError

Q = "model.layers.0.self_attn.q_proj"
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}
Tensors = dict[str, torch.Tensor]


def layer(n: int = 24, k: int = 64, group: int = 32, symmetric: bool = False) -> oracle.Layer:
    return oracle.random_layer(n, k, group, symmetric=symmetric)


def tensors_of(source: oracle.Layer, dialect: str, module: str = Q, symmetric: bool = False) -> Tensors:
    arrays = {
        "gemm": oracle.gemm_tensors,
        "gemv": oracle.gemv_tensors,
        "ct": lambda item: oracle.pack_quantized_tensors(item, symmetric),
    }[dialect](source)
    return {f"{module}.{name}": torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def compressed(group: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, **(group or {})}}},
        "ignore": ["lm_head"],
        **top,
    }


def plan_for(folder: Path, tensors: Tensors, quantization: object = None, **over: Any) -> QuantPlan:
    config = {**CONFIG, "quantization_config": quantization, **over}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return resolve(read_model_config(folder), Checkpoint(folder))


def test_every_dialect_gives_the_same_numbers(tmp_path: Path) -> None:
    source = layer()
    cases = {"gemm": AWQ, "gemv": {**AWQ, "version": "GEMV"}, "ct": compressed()}
    for dialect, settings in cases.items():
        got = plan_for(tmp_path, tensors_of(source, dialect), settings).linear(Q, 24, 64)
        assert isinstance(got, Int4Weight)
        np.testing.assert_array_equal(got.dequantise().numpy(), source.weight())


@pytest.mark.parametrize(("declared", "real"), [(-1, 64), (32, 32), (64, 64), (16, 16)])
def test_group_sizes_of_awq(declared: int, real: int, tmp_path: Path) -> None:
    source = layer(group=real)
    plan = plan_for(tmp_path, tensors_of(source, "gemm"), {**AWQ, "group_size": declared})
    got = plan.linear(Q, 24, 64)
    assert isinstance(got, Int4Weight)
    assert got.group_size == real
    np.testing.assert_array_equal(got.dequantise().numpy(), source.weight())


def test_odd_group_counts_load(tmp_path: Path) -> None:
    source = layer(k=96, group=32)
    got = plan_for(tmp_path, tensors_of(source, "gemm"), AWQ).linear(Q, 24, 96)
    np.testing.assert_array_equal(got.dequantise().numpy(), source.weight())


@pytest.mark.parametrize("size", [0, -2, 48])
def test_a_group_size_that_cannot_be_names_the_layer_before_reading(size: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{Q}: group_size is {size}; expected -1 or a positive divisor"):
        plan_for(tmp_path, tensors_of(layer(), "gemm"), {**AWQ, "group_size": size})


def test_symmetric_means_the_midpoint(tmp_path: Path) -> None:
    source = layer(symmetric=True)
    with_zeros = tensors_of(source, "gemm")
    without = {name: tensor for name, tensor in with_zeros.items() if not name.endswith("qzeros")}
    first = plan_for(tmp_path, without, {**AWQ, "zero_point": False}).linear(Q, 24, 64).dequantise()
    second = plan_for(tmp_path, with_zeros, AWQ).linear(Q, 24, 64).dequantise()
    assert torch.equal(first, second)
    with pytest.raises(CheckpointError, match=f"tensor {Q}.qzeros not in the checkpoint"):
        plan_for(tmp_path, without, AWQ)


def test_stored_zeros_count_even_if_none_are_declared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = layer()
    plan = plan_for(tmp_path, tensors_of(source, "gemm"), {**AWQ, "zero_point": False})
    np.testing.assert_array_equal(plan.linear(Q, 24, 64).dequantise().numpy(), source.weight())
    assert "qzeros is stored although the config declares none" in caplog.text


def test_the_declared_version_rules_a_square_layer(tmp_path: Path) -> None:
    source = layer(n=64, k=64, group=64)
    packed = {name: t for name, t in tensors_of(source, "gemv").items() if not name.endswith(("zeros", "scales"))}
    gemm = {name: t for name, t in tensors_of(source, "gemm").items() if name.endswith(("zeros", "scales"))}
    # Words of one dialect under the name of the other: same shapes, and only the declaration tells.
    assert packed[f"{Q}.qweight"].shape == tensors_of(source, "gemm")[f"{Q}.qweight"].shape == (64, 8)
    got = plan_for(tmp_path, {**packed, **gemm}, {**AWQ, "group_size": 64}).linear(Q, 64, 64)
    assert not np.array_equal(got.dequantise().numpy(), source.weight())


@pytest.mark.parametrize(("stored", "declared"), [("gemv", "gemm"), ("gemm", "gemv")])
def test_a_version_that_contradicts_the_shapes_is_an_error_naming_the_other(
    stored: str, declared: str, tmp_path: Path
) -> None:
    plan = plan_for(tmp_path, tensors_of(layer(), stored), {**AWQ, "version": declared})
    with pytest.raises(CheckpointError, match=f"which is the shape of version {stored}; expected .* for {declared}"):
        plan.linear(Q, 24, 64)


@pytest.mark.parametrize("listed", [None, [], ..., ["lm_head", "mlp.gate", "self_attn.kv_b_proj"]])
def test_an_exclusion_list_never_changes_what_is_read(
    listed: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, gate = layer(), "model.layers.0.mlp.gate_proj"
    settings = {**AWQ, **({} if listed is ... else {"modules_to_not_convert": listed})}
    tensors = tensors_of(source, "gemm") | tensors_of(source, "gemm", gate)
    tensors |= {"model.layers.0.mlp.gate.weight": torch.ones(4, 64), "lm_head.weight": torch.ones(16, 64)}
    plan = plan_for(tmp_path, tensors, settings)
    assert isinstance(plan.linear(Q, 24, 64), Int4Weight)
    assert isinstance(plan.linear(gate, 24, 64), Int4Weight)
    assert isinstance(plan.output_head("lm_head", "model.embed_tokens", (16, 64), tied=False), DenseWeight)
    assert caplog.records == []


def test_disagreement_with_the_list_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = "model.layers.0.self_attn.k_proj"
    tensors = tensors_of(layer(), "gemm") | {f"{other}.weight": torch.ones(8, 64), "a.weight": torch.ones(8, 64)}
    plan = plan_for(tmp_path, tensors, {**AWQ, "modules_to_not_convert": ["q_proj"]})
    plan.linear(other, 8, 64)
    plan.linear("a", 8, 64)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 2
    assert f"listed as not converted are stored packed and read so, {Q} among them" in messages[0]
    assert f"{other} is stored dense though not listed" in messages[1]


def test_a_listed_name_matches_whole_parts_only(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, tensors_of(layer(), "gemm"), {**AWQ, "modules_to_not_convert": ["mlp.gate", "lm_head."]})
    names = ["model.layers.0.mlp.gate", "lm_head", "mlp.gate", "model.layers.0.mlp.gate_proj", "x.lm_head2", "gate"]
    assert [plan.settings.excludes(name) for name in names] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**AWQ, "bits": 8}, "bits 8 is not implemented; AWQ is read at 4 bits"),
        ({**AWQ, "version": "marlin"}, "version 'marlin' is not implemented; AWQ is read as gemm or gemv"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "checkpoint_format": "gemv_fast"},
            "checkpoint_format 'gemv_fast' is not implemented; AWQ is read as gemm or gemv",
        ),
        ({**AWQ, "backend": "llm-awq"}, "backend 'llm-awq' is not implemented"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not implemented; supported are awq"),
        ({"quant_method": "quark", "fmt": "e4m3"}, r"quant_method 'quark' \(format 'e4m3'\) is not implemented"),
        (compressed(format="nvfp4-pack-quantized"), "'compressed-tensors' with format 'nvfp4-pack-quantized'"),
        (compressed({"num_bits": 8}), "num_bits 8 is not implemented"),
        (compressed({"type": "float"}), "num_bits 4 is not implemented; pack-quantized is read as 4-bit integers"),
        (compressed({"actorder": "shuffled"}), "actorder 'shuffled' is not implemented"),
        (compressed({"strategy": "tensor"}), "strategy 'tensor' is not implemented"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    ],
)
def test_a_label_that_cannot_be_read_is_one_line_before_any_file_is_opened(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_model_config(tmp_path)  # no weight file exists here
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 4, "group_size": 32}, "quant_method is missing; expected a string"),
        ({**AWQ, "group_size": "32"}, "group_size is '32'; expected an integer"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "expected a list of strings"),
        ({**AWQ, "zero_point": 1}, "zero_point is 1; expected true or false"),
        ({**compressed(), "config_groups": {}}, "config_groups is missing or empty"),
        (
            {**compressed(), "config_groups": {"g": {"targets": []}}},
            "config_groups.g is .*; expected an object with weights",
        ),
    ],
)
def test_settings_that_make_no_sense_name_the_key(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_for(tmp_path, tensors_of(layer(), "gemm"), settings)


def test_w4a8_is_refused(tmp_path: Path) -> None:
    settings = compressed()
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(UnsupportedModelError, match="input_activations"):
        plan_for(tmp_path, tensors_of(layer(), "ct"), settings)


def test_packed_tensors_without_a_label_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no quantization_config, yet 1 layers are packed, {Q}"):
        plan_for(tmp_path, tensors_of(layer(), "gemm"))


def test_autoawqs_old_settings_file_is_honoured(tmp_path: Path) -> None:
    legacy = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(legacy))
    source = layer()
    got = plan_for(tmp_path, tensors_of(source, "gemm")).linear(Q, 24, 64)
    np.testing.assert_array_equal(got.dequantise().numpy(), source.weight())


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_symmetric_channel_and_padding(symmetric: bool, tmp_path: Path) -> None:
    source = layer(n=20, k=60, group=60, symmetric=symmetric)
    settings = compressed({"strategy": "channel", "group_size": None, "symmetric": symmetric})
    got = plan_for(tmp_path, tensors_of(source, "ct", symmetric=symmetric), settings).linear(Q, 20, 60)
    np.testing.assert_array_equal(got.dequantise().numpy(), source.weight())


def test_compressed_tensors_groups_of_two_sizes(tmp_path: Path) -> None:
    settings, other = compressed(), "model.layers.0.mlp.down_proj"
    wide = {**settings["config_groups"]["group_0"]["weights"], "group_size": 64}
    settings["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": wide}
    narrow_source, wide_source = layer(), layer(k=128, group=64)
    tensors = tensors_of(narrow_source, "ct") | tensors_of(wide_source, "ct", other)
    plan = plan_for(tmp_path, tensors, settings)
    np.testing.assert_array_equal(plan.linear(Q, 24, 64).dequantise().numpy(), narrow_source.weight())
    np.testing.assert_array_equal(plan.linear(other, 24, 128).dequantise().numpy(), wide_source.weight())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}, "gives group 0 64 inputs; expected 32"),
        ({f"{Q}.weight": torch.ones(24, 64)}, "stored twice"),
        ({f"{Q}.weight_shape": torch.tensor([64, 24])}, r"says \[64, 24\]; expected \[24, 64\]"),
        ({f"{Q}.weight_scale": torch.ones(24, 3)}, r"weight_scale has shape \[24, 3\]; expected \[24, 2\]"),
        ({f"{Q}.weight_scale": torch.full((24, 2), float("nan"))}, "infinities or NaN"),
        ({f"{Q}.weight_packed": torch.ones(24, 8, dtype=torch.int64)}, "weight_packed has dtype int64; expected int32"),
        ({f"{Q}.weight_zero_point": torch.ones(3, 2)}, "weight_zero_point has dtype float32; expected int32"),
    ],
)
def test_bad_packed_tensors_are_named(change: Tensors, message: str, tmp_path: Path) -> None:
    def load() -> object:
        return plan_for(tmp_path, tensors_of(layer(), "ct") | change, compressed()).linear(Q, 24, 64)

    with pytest.raises(DeepseekTgiError, match=message):
        load()


def test_biases_are_read_as_asked(tmp_path: Path) -> None:
    bias = torch.arange(24.0)
    plan = plan_for(tmp_path, tensors_of(layer(), "gemm") | {f"{Q}.bias": bias}, AWQ)
    for wanted, expected in ((True, bias), (None, bias), (False, None)):
        got = plan.linear(Q, 24, 64, wanted).bias
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, bias)
    with pytest.raises(CheckpointError, match=f"tensor {Q}.bias"):
        plan_for(tmp_path, tensors_of(layer(), "gemm"), AWQ).linear(Q, 24, 64, True)


def test_unreadable_dense_dtypes_are_named(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, {"a.weight": torch.ones(2, 2, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match=r"a\.weight has dtype float64; expected float16 or bfloat16"):
        plan.linear("a", 2, 2)


EMBED = torch.arange(16.0 * 64).view(16, 64)


@pytest.mark.parametrize("extra", ["none", "equal", "differs", "packed", "head only"])
def test_a_tied_head_is_the_embedding_whatever_is_stored(
    extra: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"model.embed_tokens.weight": EMBED}
    if extra in ("equal", "differs"):
        tensors["lm_head.weight"] = EMBED.clone() if extra == "equal" else EMBED + 1
    elif extra == "packed":
        tensors |= tensors_of(layer(n=16), "gemm", "lm_head")
    elif extra == "head only":
        tensors = {"lm_head.weight": EMBED}
    plan = plan_for(tmp_path, tensors, AWQ if extra == "packed" else None, tie_word_embeddings=True)
    table = plan.embedding("model.embed_tokens", "lm_head", (16, 64), tied=True)
    head = plan.output_head("lm_head", "model.embed_tokens", (16, 64), tied=True)
    assert isinstance(head, DenseWeight)
    assert head.weight.data_ptr() == table.data_ptr()
    assert torch.equal(head.weight, EMBED)
    assert plan.checkpoint.unused() == []
    assert ("the embedding is used" in caplog.text) == (extra in ("differs", "packed"))


def test_an_untied_head_is_required(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, {"model.embed_tokens.weight": EMBED})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        plan.output_head("lm_head", "model.embed_tokens", (16, 64), tied=False)
