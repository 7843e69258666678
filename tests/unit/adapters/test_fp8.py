"""Layers of 8-bit floats: blocks, rows, exponents as scales, and every way a file can contradict its config."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import fp8 as oracle
from safetensors.torch import save_file

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.quantization import QuantPlan, resolve
from deepseek_tgi.adapters.weight_forms import DenseWeight, Fp8Weight
from deepseek_tgi.errors import CheckpointError, DeepseekTgiError, UnsupportedModelError

KV = "model.layers.0.self_attn.kv_a_proj_with_mqa"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
Tensors = dict[str, torch.Tensor]


def drawn(n: int, k: int, rows: int = 128, columns: int = 128, powers: bool = False) -> oracle.Fp8Layer:
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[codes & 127 == 127] = 126
    grid = (-(-n // rows), -(-k // columns))
    scales = 2.0 ** rng.integers(-9, 3, grid) if powers else rng.random(grid) * 0.01 + 1e-4
    return oracle.Fp8Layer(codes, scales.astype(np.float32), rows, columns)


def tensors_of(layer: oracle.Fp8Layer, name: str = "weight_scale_inv", module: str = KV) -> Tensors:
    codes = torch.from_numpy(layer.codes).view(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.{name}": torch.from_numpy(layer.scales)}


def plan_for(folder: Path, tensors: Tensors, settings: dict[str, Any] | None, **over: Any) -> QuantPlan:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings, **over}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return resolve(read_model_config(folder), Checkpoint(folder))


def read(plan: QuantPlan, n: int, k: int) -> Fp8Weight:
    weight = plan.linear(KV, n, k)
    assert isinstance(weight, Fp8Weight)
    return weight


# 576 x 7168 is DeepSeek-V3's kv_a, in small: neither side a multiple of the block.
@pytest.mark.parametrize(("n", "k"), [(144, 200), (128, 128), (7, 1), (256, 130)])
def test_blocks_need_not_divide_a_side(tmp_path: Path, n: int, k: int) -> None:
    layer = drawn(n, k)
    weight = read(plan_for(tmp_path, tensors_of(layer), FP8), n, k)
    np.testing.assert_array_equal(weight.dequantise().numpy(), layer.weight())
    assert weight.block == min(128, k)


def test_blocks_of_any_size_are_read_from_the_config(tmp_path: Path) -> None:
    layer = drawn(70, 90, 32, 48)
    plan = plan_for(tmp_path, tensors_of(layer), {**FP8, "weight_block_size": [32, 48]})
    np.testing.assert_array_equal(read(plan, 70, 90).dequantise().numpy(), layer.weight())
    assert plan.label == "fp8-32x48"


def test_a_block_far_larger_than_the_layer_takes_no_memory(tmp_path: Path) -> None:
    layer = drawn(70, 90, 10**12, 10**12)
    weight = read(plan_for(tmp_path, tensors_of(layer), {**FP8, "weight_block_size": [10**12, 10**12]}), 70, 90)
    np.testing.assert_array_equal(weight.dequantise().numpy(), layer.weight())
    assert (weight.block, weight.scales.shape) == (90, (70, 1))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e8m0fnu", "uint8"])
def test_powers_of_two_are_read_from_every_dtype(tmp_path: Path, kind: str) -> None:
    layer = drawn(144, 200, powers=True)
    tensors, name = tensors_of(layer), f"{KV}.weight_scale_inv"
    if kind == "uint8":
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu).view(torch.uint8)
    else:
        tensors[name] = tensors[name].to(getattr(torch, kind))
    plan = plan_for(tmp_path, tensors, {**FP8, "scale_fmt": "ue8m0"})
    np.testing.assert_array_equal(read(plan, 144, 200).dequantise().numpy(), layer.weight())


def test_bare_exponents_mean_what_the_format_says(tmp_path: Path) -> None:
    codes = torch.full((1, 254), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.0
    exponents = torch.arange(254, dtype=torch.uint8).view(1, -1)
    tensors = {f"{KV}.weight": codes, f"{KV}.weight_scale_inv": exponents}
    plan = plan_for(tmp_path, tensors, {**FP8, "weight_block_size": [1, 1], "scale_fmt": "ue8m0"})
    # 2^-127 is below float32's normal numbers, yet exact.
    np.testing.assert_array_equal(read(plan, 1, 254).dequantise().numpy(), oracle.e8m0(exponents.numpy()))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (40,), (40, 1)], ids=str)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_one_scale_for_all_or_one_a_row(
    tmp_path: Path, shape: tuple[int, ...], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = drawn(40, 50, 1, 50)
    scale = torch.from_numpy(layer.scales[:, 0]) if 40 in shape else torch.tensor(0.25)
    tensors = tensors_of(layer, name) | {f"{KV}.{name}": scale.reshape(shape).clone()}
    tensors[f"{KV}.input_scale"] = torch.tensor(0.5)  # of activations, which stay as they are
    plan = plan_for(tmp_path, tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    expected = oracle.e4m3(layer.codes).astype(np.float32) * scale.numpy().reshape(-1, 1)
    np.testing.assert_array_equal(read(plan, 40, 50).dequantise().numpy(), expected)
    assert plan.checkpoint.unused() == []
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    layer = drawn(256, 384)
    tensors = tensors_of(layer)
    given: dict[str, list[torch.Tensor] | torch.Tensor] = {
        "weight": [tensors[f"{KV}.weight"]],
        "weight_scale_inv": [tensors[f"{KV}.weight_scale_inv"]],
    }
    theirs = Fp8Dequantize(None).convert(given)["weight"]
    ours = read(plan_for(tmp_path, tensors, FP8), 256, 384).dequantise()
    assert isinstance(theirs, torch.Tensor)
    assert torch.equal(theirs, ours)


def test_compressed_tensors_names_and_blocks(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}
    layer = drawn(144, 200)
    plan = plan_for(tmp_path, tensors_of(layer, "weight_scale"), settings)
    np.testing.assert_array_equal(read(plan, 144, 200).dequantise().numpy(), layer.weight())
    assert plan.label == "compressed-tensors-fp8-128x128"


def test_modules_left_alone_are_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dense = {"lm_head.weight": torch.ones(16, 64), "model.layers.0.mlp.gate.weight": torch.ones(4, 64)}
    other = {"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64).bfloat16()}
    tensors = tensors_of(drawn(144, 200)) | dense | other
    plan = plan_for(tmp_path, tensors, {**FP8, "modules_to_not_convert": ["up_proj"]})
    assert isinstance(plan.output_head("lm_head", "model.embed_tokens", (16, 64), tied=False), DenseWeight)
    assert isinstance(plan.linear("model.layers.0.mlp.gate", 4, 64), DenseWeight)
    assert isinstance(plan.linear("model.layers.0.mlp.up_proj", 96, 64), DenseWeight)
    assert caplog.records == []


def test_layers_behind_the_models_own_are_not_judged(tmp_path: Path) -> None:
    broken = {"model.layers.1.eh_proj.weight": torch.ones(8, 8).to(torch.float8_e5m2)}
    assert plan_for(tmp_path, tensors_of(drawn(144, 200)) | broken, FP8)
    inside = {"model.layers.0.eh_proj.weight": torch.ones(8, 8).to(torch.float8_e5m2)}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.eh_proj\.weight has dtype float8_e5m2"):
        plan_for(tmp_path, inside, FP8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale_inv": None}, f"tensor {KV}.weight_scale_inv not in the checkpoint"),
        ({"weight_scale_inv": torch.ones(2, 3)}, r"has shape \[2, 3\]; expected \[2, 2\] for blocks of 128 x 128"),
        ({"weight_scale_inv": torch.ones(())}, r"has shape \[\]; expected \[2, 2\]"),
        ({"weight_scale_inv": torch.ones(2, 2).to(torch.int32)}, "has dtype int32; expected float32 or bfloat16"),
        ({"weight": torch.ones(144, 200).to(torch.float8_e5m2)}, "has dtype float8_e5m2, which is not implemented"),
        ({"weight": torch.ones(28800).to(torch.float8_e4m3fn)}, r"has shape \[28800\]; expected two sides"),
    ],
)
def test_headers_that_do_not_go_together_are_refused_before_any_tensor_is_read(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = tensors_of(drawn(144, 200)) | {f"{KV}.{name}": tensor for name, tensor in change.items()}
    with pytest.raises(DeepseekTgiError, match=message):
        plan_for(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}, FP8)


def test_values_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        tensors = tensors_of(drawn(144, 200))
        tensors[f"{KV}.weight_scale_inv"][1, 1] = value
        with pytest.raises(CheckpointError, match="weight_scale_inv holds infinities or NaN"):
            plan_for(tmp_path, tensors, FP8).linear(KV, 144, 200)
    for code in (0x7F, 0xFF):
        tensors = tensors_of(drawn(144, 200))
        tensors[f"{KV}.weight"].view(torch.uint8)[143, 199] = code
        with pytest.raises(CheckpointError, match=r"with_mqa\.weight holds NaN"):
            plan_for(tmp_path, tensors, FP8).linear(KV, 144, 200)


def test_a_shape_that_is_not_the_models_is_named(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, tensors_of(drawn(144, 200)), FP8)
    with pytest.raises(CheckpointError, match=r"has shape \[144, 200\]; expected \[144, 208\]"):
        plan.linear(KV, 144, 208)


def test_floats_without_a_label_or_under_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no quantization_config, yet 1 layers are stored in 8-bit floats, {KV}"):
        plan_for(tmp_path, tensors_of(drawn(144, 200)), None)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    with pytest.raises(CheckpointError, match="awq there, yet 1 layers are stored in 8-bit floats"):
        plan_for(tmp_path, tensors_of(drawn(144, 200)), awq)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({**FP8, "fmt": "e5m2"}, UnsupportedModelError, "fmt 'e5m2' is not implemented; 8-bit floats are read as e4m3"),
        ({**FP8, "scale_fmt": "ue4m3"}, UnsupportedModelError, "scale_fmt 'ue4m3' is not implemented"),
        ({**FP8, "activation_scheme": "block"}, UnsupportedModelError, "activation_scheme 'block'"),
        ({**FP8, "expert_dtype": "fp4"}, UnsupportedModelError, "expert_dtype 'fp4' is not implemented"),
        ({**FP8, "weight_block_size": [128]}, CheckpointError, "expected two positive integers"),
        ({**FP8, "weight_block_size": [128, 0]}, CheckpointError, "expected two positive integers"),
        ({**FP8, "weight_block_size": [True, 128]}, CheckpointError, "expected two positive integers"),
        ({**FP8, "weight_block_size": "128x128"}, CheckpointError, "expected two positive integers"),
    ],
)
def test_settings_that_are_not_read_are_refused_from_the_config(
    tmp_path: Path, settings: dict[str, Any], error: type[DeepseekTgiError], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    with pytest.raises(error, match=message):
        read_model_config(tmp_path)
