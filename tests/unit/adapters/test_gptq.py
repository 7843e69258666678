"""GPTQ: both public forms, zeros and their wrap, activation order, and every way a file can contradict its config."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import gptq as oracle
from safetensors.torch import save_file

from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.quantization import QuantPlan, resolve
from deepseek_tgi.adapters.weight_forms import Int4Weight
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

Q = "model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
SYMMETRIC = {**GPTQ, "sym": True}
ORDERED = {**GPTQ, "desc_act": True}
N, K = 24, 64
Tensors = dict[str, torch.Tensor]


def tensors_of(layer: oracle.GptqLayer, version: int = 1, without: tuple[str, ...] = ()) -> Tensors:
    arrays = oracle.gptq_tensors(layer, version)
    return {f"{Q}.{n}": torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items() if n not in without}


def plan_for(folder: Path, tensors: Tensors, settings: dict[str, Any] | None) -> QuantPlan:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return resolve(read_model_config(folder), Checkpoint(folder))


def read(folder: Path, tensors: Tensors, settings: dict[str, Any], k: int = K) -> Int4Weight:
    weight = plan_for(folder, tensors, settings).linear(Q, N, k)
    assert isinstance(weight, Int4Weight)
    return weight


def assert_means(weight: Int4Weight, layer: oracle.GptqLayer) -> None:
    np.testing.assert_array_equal(weight.dequantise().numpy(), layer.weight())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("name", "version"), [("gptq", 1), ("gptq_v2", 2), (None, 1)])
def test_both_forms_give_the_weights_they_stand_for(
    tmp_path: Path, name: str | None, version: int, symmetric: bool, ordered: bool
) -> None:
    layer = oracle.random_layer(N, K, 32, symmetric=symmetric, ordered=ordered)
    settings = {**GPTQ, "sym": symmetric, "desc_act": ordered}
    weight = read(
        tmp_path, tensors_of(layer, version), settings | ({} if name is None else {"checkpoint_format": name})
    )
    assert_means(weight, layer)
    assert (weight.order is not None) == ordered


def test_a_hand_worked_layer(tmp_path: Path) -> None:
    # Eight outputs, eight inputs, one group. Word n of qweight holds the inputs of output n, lowest nibble first; the
    # one word of zeros holds 8 7 6 5 4 3 2 1, less one.
    tensors = {
        f"{Q}.qweight": torch.tensor([[0x76543210] * 7 + [0x00000005]], dtype=torch.int32),
        f"{Q}.qzeros": torch.tensor([[0x01234567]], dtype=torch.int32),
        f"{Q}.scales": torch.tensor([[0.5] * 8], dtype=torch.float16),
        f"{Q}.g_idx": torch.zeros(8, dtype=torch.int32),
    }
    weight = plan_for(tmp_path, tensors, {**GPTQ, "group_size": 8}).linear(Q, 8, 8).dequantise()
    assert weight[0].tolist() == [(code - 8) * 0.5 for code in range(8)]
    assert weight[1].tolist() == [(code - 7) * 0.5 for code in range(8)]
    assert weight[7].tolist() == [(5 - 1) * 0.5, *[-0.5] * 7]


def test_a_zero_of_nought_takes_its_one_back_from_its_neighbour(tmp_path: Path) -> None:
    # As GPTQModel stores zeros [0, 5, 8, 8, 8, 8, 8, 8]: 0x88888850 - 0x11111111 = 0x7777773f, whose second nibble is
    # one less than 5 - 1. Adding one to each nibble alone would read the neighbour as 4.
    tensors = tensors_of(oracle.random_layer(8, 8, 8))
    tensors[f"{Q}.qzeros"] = torch.tensor([[0x7777773F]], dtype=torch.int32)
    weight = plan_for(tmp_path, tensors, {**GPTQ, "group_size": 8}).linear(Q, 8, 8)
    assert isinstance(weight, Int4Weight)
    assert weight.zeros.flatten().tolist() == [0, 5, 8, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("declared", ["gptq", "gptq_v2"])
def test_symmetric_zeros_mean_the_midpoint_whatever_the_form_is_called(
    tmp_path: Path, declared: str, stored: int, caplog: pytest.LogCaptureFixture
) -> None:
    layer = oracle.random_layer(N, K, 32, symmetric=True)
    settings = {**SYMMETRIC, "checkpoint_format": declared}
    assert_means(read(tmp_path, tensors_of(layer, stored), settings), layer)
    assert_means(read(tmp_path, tensors_of(layer, stored, without=("qzeros",)), settings), layer)
    assert caplog.records == []


def test_zeros_that_are_no_midpoint_count_even_if_symmetry_is_declared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = oracle.random_layer(N, K, 32)
    assert_means(read(tmp_path, tensors_of(layer), SYMMETRIC), layer)
    assert "qzeros is stored although the config declares none; it is used" in caplog.text


@pytest.mark.parametrize("size", [32, 64, -1])
def test_group_sizes_and_a_short_last_group(tmp_path: Path, size: int) -> None:
    k = 176  # 5.5 groups of 32, 2.75 of 64
    for ordered in (False, True):
        layer = oracle.random_layer(N, k, k if size == -1 else size, ordered=ordered)
        settings = {**GPTQ, "group_size": size, "desc_act": ordered}
        assert_means(read(tmp_path, tensors_of(layer), settings, k), layer)


@pytest.mark.parametrize("size", [128, 97, 2**31 - 1])
def test_a_group_wider_than_the_input_side_is_one_group(tmp_path: Path, size: int) -> None:
    layer = oracle.random_layer(N, K, K)
    weight = read(tmp_path, tensors_of(layer), {**GPTQ, "group_size": size})
    assert_means(weight, layer)
    assert weight.zeros.shape == (N, 1)


def test_an_index_in_file_order_or_absent_or_unset_gathers_nothing(tmp_path: Path) -> None:
    layer = oracle.random_layer(N, K, 32)
    unset = tensors_of(layer) | {f"{Q}.g_idx": torch.full((K,), -1, dtype=torch.int32)}
    for tensors in (tensors_of(layer), tensors_of(layer, without=("g_idx",)), unset):
        weight = read(tmp_path, tensors, GPTQ)
        assert weight.order is None
        assert_means(weight, layer)


def test_an_order_counts_even_if_none_is_declared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = oracle.random_layer(N, K, 32, ordered=True)
    assert_means(read(tmp_path, tensors_of(layer), GPTQ), layer)
    assert "g_idx sorts the inputs although the config declares no such order" in caplog.text


def test_an_order_that_is_declared_must_be_stored_unless_groups_are_static(tmp_path: Path) -> None:
    layer = oracle.random_layer(N, K, 32)
    without = tensors_of(layer, without=("g_idx",))
    with pytest.raises(CheckpointError, match=rf"tensor {Q}\.g_idx not in the checkpoint"):
        plan_for(tmp_path, without, ORDERED)
    assert_means(read(tmp_path, without, {**ORDERED, "static_groups": True}), layer)


def test_columns_lie_group_by_group_behind_their_order(tmp_path: Path) -> None:
    layer = oracle.random_layer(N, K, 32, ordered=True)
    weight = read(tmp_path, tensors_of(layer), ORDERED)
    assert weight.order is not None
    assert layer.group[weight.order.numpy()].tolist() == [0] * 32 + [1] * 32
    np.testing.assert_array_equal(weight.codes.numpy(), layer.codes[:, weight.order.numpy()])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qzeros": None}, r"qzeros not in the checkpoint"),
        ({"scales": None}, r"scales not in the checkpoint"),
        ({"weight": torch.ones(N, K)}, "stored twice"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused_before_any_is_read(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = changed(tensors_of(oracle.random_layer(N, K, 32)), change)
    with pytest.raises(CheckpointError, match=message):
        plan_for(tmp_path, tensors, GPTQ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qweight": torch.zeros(K, 3, dtype=torch.int32)}, "which is the shape of version gemm"),
        ({"qweight": torch.zeros(9, N, dtype=torch.int32)}, r"shape \[9, 24\]; expected \[8, 24\] for gptq"),
        ({"qweight": torch.zeros(8, N, dtype=torch.int64)}, "qweight has dtype int64; expected int32"),
        ({"qzeros": torch.zeros(2, 4, dtype=torch.int32)}, r"qzeros has shape \[2, 4\]; expected \[2, 3\]"),
        ({"scales": torch.ones(3, N)}, r"scales has shape \[3, 24\]; expected \[2, 24\]"),
        ({"scales": torch.full((2, N), float("inf"))}, "scales holds infinities or NaN"),
        ({"g_idx": torch.zeros(K - 1, dtype=torch.int32)}, r"g_idx has shape \[63\]; expected \[64\]"),
        ({"g_idx": torch.zeros(K)}, "g_idx has dtype float32; expected int32"),
        ({"g_idx": torch.arange(K, dtype=torch.int32)}, "holds 0 to 63; expected groups from 0 to 1"),
        ({"g_idx": torch.tensor([-3] + [0] * 31 + [1] * 32, dtype=torch.int32)}, "holds -3 to 1"),
        ({"g_idx": torch.tensor([0] * 33 + [1] * 31, dtype=torch.int32)}, "gives group 0 33 inputs; expected 32"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = changed(tensors_of(oracle.random_layer(N, K, 32)), change)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, tensors, GPTQ)


def changed(tensors: Tensors, change: dict[str, torch.Tensor | None]) -> Tensors:
    given = {f"{Q}.{name}": tensor for name, tensor in change.items()}
    return {name: t for name, t in (tensors | given).items() if t is not None}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**GPTQ, "bits": 3}, "bits 3 is not implemented; GPTQ is read at 4 bits"),
        ({**GPTQ, "bits": 8}, "bits 8 is not implemented"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not implemented"),
        ({**GPTQ, "format": "bitblas"}, "format 'bitblas' is not implemented"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True is not implemented"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16' is not implemented"),
        ({**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8}}}, r"dynamic\.\+:\.\*down_proj\.bits 8 is not implemented"),
        ({"quant_method": "auto-round", "bits": 4}, "quant_method 'auto-round' is not implemented; supported are awq"),
    ],
)
def test_what_is_not_read_is_refused_by_name_from_the_config(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_size_without_sense_names_the_layer(tmp_path: Path, size: int) -> None:
    with pytest.raises(CheckpointError, match=rf"{Q}: group_size is {size}"):
        plan_for(tmp_path, tensors_of(oracle.random_layer(N, K, 32)), {**GPTQ, "group_size": size})


def test_dynamic_rules_give_modules_groups_of_their_own(tmp_path: Path) -> None:
    down = "model.layers.0.mlp.down_proj"
    narrow, wide = oracle.random_layer(N, K, 32), oracle.random_layer(N, K, 64, seed=1)
    tensors = tensors_of(narrow) | {n.replace(Q, down): t for n, t in tensors_of(wide).items()}
    rules = {"+:.*down_proj": {"group_size": 64}, r"-:model\.layers\.0\.mlp\.up_proj": {}}
    plan = plan_for(tmp_path, tensors, {**GPTQ, "dynamic": rules})
    np.testing.assert_array_equal(plan.linear(Q, N, K).dequantise().numpy(), narrow.weight())
    np.testing.assert_array_equal(plan.linear(down, N, K).dequantise().numpy(), wide.weight())
    assert plan.settings.excludes("model.layers.0.mlp.up_proj")
    assert not plan.settings.excludes(Q)


def test_autogptqs_old_settings_file_is_honoured(tmp_path: Path) -> None:
    layer = oracle.random_layer(N, K, 32)
    legacy = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "model_name_or_path": None}
    (tmp_path / "quantize_config.json").write_text(json.dumps(legacy))
    plan = plan_for(tmp_path, tensors_of(layer), None)
    np.testing.assert_array_equal(plan.linear(Q, N, K).dequantise().numpy(), layer.weight())
    assert plan.label == "gptq-g32"


def test_dense_layers_beside_packed_ones_need_no_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = tensors_of(oracle.random_layer(N, K, 32)) | {"model.layers.0.self_attn.o_proj.weight": torch.ones(8, 64)}
    plan = plan_for(tmp_path, tensors, GPTQ)
    assert torch.equal(plan.linear("model.layers.0.self_attn.o_proj", 8, 64).dequantise(), torch.ones(8, 64))
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
