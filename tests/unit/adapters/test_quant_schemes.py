"""What a config declares of each module: lists, patterns, groups of targets, and the tensors it is stored as."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from deepseek_tgi.adapters.quant_schemes import Fp8Scheme, Int4Scheme, NameList
from deepseek_tgi.adapters.quant_settings import QuantSettings, read_quant_settings
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

LAYER = "model.layers.3."
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}


def settings(quantization: dict[str, Any] | None) -> QuantSettings:
    return read_quant_settings(Path("/nowhere"), quantization)


def compressed(*groups: dict[str, Any], **top: Any) -> dict[str, Any]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": named, **top}


def int4_group(targets: list[str], **weights: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    return {"targets": targets, "weights": base | weights, "input_activations": None}


FLOAT_GROUP: dict[str, Any] = {
    "targets": ["re:.*self_attn.*"],
    "format": "float-quantized",
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
}


@pytest.mark.parametrize(
    ("entries", "covered", "not_covered"),
    [
        (["mlp.gate"], f"{LAYER}mlp.gate", f"{LAYER}mlp.gate_proj"),
        (["lm_head."], "lm_head", "x.lm_head2"),
        (["model.layers.3"], f"{LAYER}mlp.up_proj", "model.layers.30.mlp.up_proj"),
        ([r"re:.*mlp\.gate$"], f"{LAYER}mlp.gate", f"{LAYER}mlp.gate_proj"),
        (["re:model.layers.3"], f"{LAYER}mlp.gate", f"x.{LAYER}mlp.gate"),
        (["", "."], "nothing", "model"),
    ],
)
def test_lists_name_whole_parts_or_patterns(entries: list[str], covered: str, not_covered: str) -> None:
    names = NameList.of(entries)
    assert names.covers(covered) == (covered != "nothing")
    assert not names.covers(not_covered)
    assert not names.opaque


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", "re:(", "re:^(?!x).*", "re:.*a.*b.*c.*d", "re:" + "a" * 300, r"re:(a)\1"]
)
def test_patterns_that_may_never_end_are_left_open(pattern: str) -> None:
    names = NameList.of([pattern])
    started = time.process_time()
    assert not names.covers("a" * 5000)
    assert not names.covers("a" * 200)
    assert names.opaque
    assert time.process_time() - started < 0.5


def test_a_long_list_costs_little_for_many_modules() -> None:
    names = NameList.of([f"model.layers.{i}.mlp.gate" for i in range(1000)])
    started = time.process_time()
    for i in range(20_000):
        assert not names.covers(f"model.layers.3.mlp.experts.{i}.down_proj")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("quantization", [AWQ, FP8, GPTQ])
def test_heads_embeddings_and_routers_are_taken_as_dense(quantization: dict[str, Any]) -> None:
    declared = settings(quantization)
    for name in ("lm_head", "model.embed_tokens", f"{LAYER}mlp.gate"):
        assert declared.scheme(name) is None
    for name in (f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.experts.7.down_proj", f"{LAYER}self_attn.kv_a_proj_with_mqa"):
        assert declared.scheme(name) is not None


def test_an_excluded_router_leaves_gate_projections_and_experts_packed() -> None:
    declared = settings({**AWQ, "modules_to_not_convert": ["mlp.gate", "self_attn.kv_b_proj"]})
    assert declared.scheme(f"{LAYER}self_attn.kv_b_proj") is None
    for name in ("mlp.gate_proj", "mlp.experts.0.gate_proj", "mlp.shared_experts.gate_proj", "self_attn.q_a_proj"):
        assert declared.scheme(LAYER + name) == Int4Scheme(declared.schemes[0].layout, 128, True)  # type: ignore[union-attr]


def test_each_module_has_the_scheme_of_the_first_group_that_names_it() -> None:
    wide = int4_group(["re:.*down_proj$"], strategy="channel", group_size=None)
    one = int4_group([f"{LAYER}mlp.up_proj"], group_size=32, symmetric=False, actorder="group")
    linear = int4_group(["Linear"])
    declared = settings(compressed(linear, wide, one, ignore=["lm_head", r"re:.*mlp.gate$"]))
    found = {name: declared.scheme(LAYER + name) for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")}
    layout = declared.layout
    assert layout is not None
    assert found == {
        "mlp.up_proj": Int4Scheme(layout, 32, zero_point=True, sorted_groups=True),
        "mlp.down_proj": Int4Scheme(layout, -1, zero_point=False),
        "self_attn.q_proj": Int4Scheme(layout, 128, zero_point=False),
    }
    assert declared.scheme("lm_head") is None
    assert settings(compressed(linear)).scheme("lm_head") is not None, "Linear is the head too, unless ignored"


def test_groups_of_integers_and_floats_may_stand_side_by_side() -> None:
    declared = settings(compressed(int4_group(["re:.*mlp.*"]), FLOAT_GROUP, format="mixed-precision"))
    assert isinstance(declared.scheme(f"{LAYER}mlp.up_proj"), Int4Scheme)
    assert declared.scheme(f"{LAYER}self_attn.o_proj") == Fp8Scheme(None, "weight_scale")
    assert declared.scheme(f"{LAYER}other") is None


@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_an_order_of_work_is_no_order_of_inputs(actorder: object) -> None:
    (scheme,) = settings(compressed(int4_group(["Linear"], actorder=actorder))).schemes
    assert isinstance(scheme, Int4Scheme)
    assert not scheme.sorted_groups


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ({**FLOAT_GROUP, "format": "nvfp4-pack-quantized"}, UnsupportedModelError, "format 'nvfp4-pack-quantized'"),
        (
            {**FLOAT_GROUP, "format": "int-quantized"},
            UnsupportedModelError,
            "format 'int-quantized' is not implemented",
        ),
        (
            {**FLOAT_GROUP, "weights": {**FLOAT_GROUP["weights"], "num_bits": 4}},
            UnsupportedModelError,
            "num_bits 4 is not implemented",
        ),
        (
            {**FLOAT_GROUP, "weights": {**FLOAT_GROUP["weights"], "symmetric": False}},
            UnsupportedModelError,
            "symmetric False",
        ),
        (
            {**FLOAT_GROUP, "weights": {**FLOAT_GROUP["weights"], "strategy": "group"}},
            UnsupportedModelError,
            "strategy 'group' is not implemented; tensor, channel and block",
        ),
        (
            {**FLOAT_GROUP, "weights": {**FLOAT_GROUP["weights"], "strategy": "block"}},
            CheckpointError,
            "block_structure is missing; expected two positive",
        ),
        (int4_group(["Linear"], actorder=["group"]), UnsupportedModelError, "actorder"),
    ],
)
def test_groups_that_are_not_read_are_refused_by_name(
    group: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        settings(compressed(group))


ITEM_BYTES = {"int32": 4, "float32": 4, "float16": 2, "float8_e4m3fn": 1}


@pytest.mark.parametrize(
    ("quantization", "label", "num_bytes"),
    [
        # 256 x 512: codes, float16 scales for 4 groups, packed zeros, indices of groups; or one byte and 2 x 4 blocks.
        (AWQ, "int4-g128", 256 * 512 // 2 + 256 * 4 * 2 + 256 * 4 // 2),
        ({**AWQ, "zero_point": False}, "int4-g128", 256 * 512 // 2 + 256 * 4 * 2),
        (GPTQ, "int4-g128", 256 * 512 // 2 + 256 * 4 * 2 + 256 * 4 // 2 + 512 * 4),
        ({**AWQ, "group_size": -1}, "int4-row", 256 * 512 // 2 + 256 * 2 + 256 // 2),
        (FP8, "fp8-128x128", 256 * 512 + 2 * 4 * 4),
        ({"quant_method": "fp8"}, "fp8", 256 * 512 + 256 * 4),
    ],
)
def test_a_scheme_knows_its_tensors(quantization: dict[str, Any], label: str, num_bytes: int) -> None:
    scheme = settings(quantization).scheme(f"{LAYER}mlp.up_proj")
    assert scheme is not None
    assert scheme.label == label
    assert sum(math.prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in scheme.tensors(256, 512)) == num_bytes
