"""DeepSeek's published configs as they are, and a name for everything in one that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_checkpoint, tiny_config

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.cache_layout import cache_layout
from deepseek_tgi.adapters.layers.rope import attention_factor, softmax_factor
from deepseek_tgi.adapters.model_config import ModelConfig, read_model_config
from deepseek_tgi.adapters.part_specs import LatentAttention
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.errors import CheckpointError, ConfigError, UnsupportedModelError
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kv.layout import KVMode

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
LITE = COMMON | {
    "model_type": "deepseek_v2",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = COMMON | {
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
ONES = {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
MODELS = {
    "V2-Lite": LITE,
    "Coder-V2-Lite": LITE,
    "V2": V2,
    "V2.5": V2 | ONES,
    "Coder-V2": V2 | ONES,
    "V3": V3 | {"quantization_config": FP8},
    "R1": V3 | {"quantization_config": FP8},
    "V3.1": V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
}
"""Sizes from the `config.json` of each model in DeepSeek's own repositories."""
BYTES = {"deepseek_v2": {27: 31_104, 60: 69_120}, "deepseek_v3": {61: 70_272}}
"""Bytes of cache a token in bfloat16: layers x (512 + 64) x 2, as the papers count them."""


def read(folder: Path, document: dict[str, Any], **over: Any) -> ModelConfig:
    kept = {key: value for key, value in {**document, **over}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return read_model_config(folder)


@pytest.mark.parametrize("name", MODELS)
def test_the_published_configs_are_read(tmp_path: Path, name: str) -> None:
    document = MODELS[name]
    config = read(tmp_path, document)
    spec, experts = config.attention, config.experts
    assert isinstance(spec, LatentAttention)
    assert experts is not None
    for key in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        assert getattr(spec, key) == document[key]
    assert spec.rope_interleave
    assert config.rope_dim == spec.qk_rope_head_dim == 64
    assert (experts.intermediate_size, experts.first_layer) == (
        document["moe_intermediate_size"],
        document["first_k_dense_replace"],
    )
    assert experts.shared_size == document["n_shared_experts"] * document["moe_intermediate_size"]
    assert config.num_extra_layers == document.get("num_nextn_predict_layers", 0)
    assert attention_factor(config.rope) == 1.0, "both mscales are equal in all of them"
    # 0.1 x 0.707 x ln 40 + 1 = 1.2608 and 0.1 x ln 40 + 1 = 1.3689, squared.
    wanted = 1.5896 if document["rope_scaling"]["mscale"] == 0.707 else 1.8739
    assert softmax_factor(config.rope) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_cache_bytes_a_token_are_the_published_arithmetic(tmp_path: Path, name: str) -> None:
    config = read(tmp_path, MODELS[name])
    wanted = BYTES[config.model_type][config.num_hidden_layers]
    sizes = {mode: cache_layout(config, mode, 16).bytes_per_token for mode in KVMode}
    assert sizes[KVMode.BFLOAT16] == sizes[KVMode.FLOAT16] == wanted
    assert sizes[KVMode.FLOAT32] == 2 * wanted
    # 512 codes of 8 or 4 bits, four scales of 16 bits for 128 elements each, 64 rotary elements of 16 bits.
    layers = config.num_hidden_layers
    assert sizes[KVMode.INT8] == sizes[KVMode.FP8] == layers * (512 + 8 + 128)
    assert sizes[KVMode.INT4] <= layers * (256 + 16 + 128), "4 bits, and at most a scale byte for 32 elements"


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        (LITE, Routing(64, 6, Scoring.SOFTMAX, GroupRank.NONE, 1, 1, False, 1.0)),
        (V2, Routing(160, 6, Scoring.SOFTMAX, GroupRank.BEST, 8, 3, False, 16.0)),
        (V3, Routing(256, 8, Scoring.SIGMOID, GroupRank.BEST_TWO, 8, 4, True, 2.5)),
    ],
    ids=["V2-Lite", "V2", "V3"],
)
def test_routing_is_the_configs(tmp_path: Path, document: dict[str, Any], wanted: Routing) -> None:
    config = read(tmp_path, document)
    assert config.experts is not None
    assert config.experts.routing == wanted


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_agrees_with_transformers_on_its_own_files(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(**tiny_config(family, rope_theta=5e5))
    theirs.save_pretrained(tmp_path)
    ours = read_model_config(tmp_path)
    twin = read(tmp_path, tiny_config(family, rope_theta=5e5))
    assert (ours.attention, ours.experts, ours.mlp) == (twin.attention, twin.experts, twin.mlp)
    assert (ours.rope, ours.num_hidden_layers) == (twin.rope, twin.num_hidden_layers)
    assert ours.num_extra_layers == getattr(theirs, "num_nextn_predict_layers", 0)


def test_absent_switches_are_each_generations_own(tmp_path: Path) -> None:
    absent = dict.fromkeys(
        ("norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "topk_method", "scoring_func"), ...
    )
    second = read(tmp_path, LITE, **absent).experts
    third = read(tmp_path, V3, **absent, n_shared_experts=...).experts
    assert second is not None
    assert third is not None
    assert (second.first_layer, third.first_layer) == (0, 3)
    assert second.routing == Routing(64, 6, Scoring.SOFTMAX, GroupRank.NONE, 1, 1, False, 1.0)
    assert third.routing == Routing(256, 8, Scoring.SIGMOID, GroupRank.BEST_TWO, 8, 4, True, 2.5)
    assert third.shared_size == 2048


def test_the_command_lines_scaling_replaces_the_files_with_its_mscales(tmp_path: Path) -> None:
    rope = read(tmp_path, V3).with_rope("linear", 2.0).rope
    assert (rope.kind.value, rope.factor) == ("linear", 2.0)
    assert (attention_factor(rope), softmax_factor(rope)) == (1.0, 1.0)


def test_layers_with_experts_follow_the_two_keys(tmp_path: Path) -> None:
    experts = read(tmp_path, LITE, moe_layer_freq=2, first_k_dense_replace=3).experts
    assert experts is not None
    assert [i for i in range(9) if experts.in_layer(i)] == [4, 6, 8]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            {"model_type": "deepseek_v32"},
            "'deepseek_v32' is not implemented: it needs sparse attention .*; supp",
        ),
        ({"model_type": "deepseek_v4"}, "'deepseek_v4' is not implemented: it needs compressed attention"),
        ({"topk_method": "gready"}, "topk_method is 'gready'; deepseek_v3 has noaux_tc"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; deepseek_v3 has noaux_tc"),
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func is 'sqrtsoftplus'; implemented are softmax, sigmoid"),
        ({"ep_size": 8}, "ep_size is 8; experts spread over ranks"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"index_topk": 2048}, "index_topk is 2048: sparse attention"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, V3, **over)


@pytest.mark.parametrize(
    "over",
    [
        *({key: "x" * 10**6} for key in ("model_type", "topk_method", "scoring_func", "hidden_act", "index_topk")),
        {"rope_scaling": {"type": "x" * 10**6}},
        {"quantization_config": {"quant_method": "x" * 10**6, "format": "y" * 10**6}},
        {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "x" * 10**6}},
        {"quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": {"x" * 10**6: 1}}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"x" * 10**6: {"weights": 1}}}},
    ],
    ids="-".join,
)
def test_a_refusal_is_short_however_long_the_value(tmp_path: Path, over: dict[str, Any]) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        read(tmp_path, V3, **over)
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


def test_the_older_generation_knows_its_own_methods(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'noaux_tc'; deepseek_v2 has greedy, group_limited_greedy"):
        read(tmp_path, V2, topk_method="noaux_tc")


SIZES = (
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "num_attention_heads", "intermediate_size",
    "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group", "hidden_size", "num_hidden_layers",
)  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_missing_or_no_number_is_named(tmp_path: Path, key: str) -> None:
    for value in (..., "8", 0, -1, 2.5):
        with pytest.raises(CheckpointError, match=f"{key} is .*; expected an integer"):
            read(tmp_path, V3, **{key: value})


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"n_group": 7}, r"n_group is 7; expected a divisor of n_routed_experts \(256\)"),
        ({"n_group": 512}, "n_group is 512; expected an integer from 1 to 256"),
        ({"topk_group": 9}, "topk_group is 9; expected an integer from 1 to 8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129; expected an integer from 1 to 128"),
        ({"num_hidden_layers": 2048}, "n_routed_experts is 256; expected an integer from 1 to 128"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; expected an even number"),
        ({"n_shared_experts": -1}, "n_shared_experts is -1; expected"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0; expected"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; expected a finite number above 0"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; expected true or false"),
        ({"q_lora_rank": "none"}, "q_lora_rank is 'none'; expected an integer"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 1e300}}, "mscale_all_dim is 1e.300; expected .* up to 1000"),
        ({"rope_scaling": YARN | {"beta_fast": 1e-320}}, "beta_fast is .*; expected a finite number of at least 1e-06"),
        ({"rope_scaling": YARN | {"mscale": "x"}}, "rope_scaling.mscale is 'x'; expected a number"),
        (
            {"model_type": "deepseek_v2", "topk_method": "greedy", "n_shared_experts": ...},
            "n_shared_experts is missing",
        ),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, V3, **over)


@pytest.mark.parametrize("mode", ["bfloat16", "int4"])
def test_a_latent_that_no_scale_group_divides_is_refused_before_weights_are_read(tmp_path: Path, mode: str) -> None:
    tiny_checkpoint(tmp_path, "deepseek_v2", config={"kv_lora_rank": 40})
    (tmp_path / "model.safetensors").write_bytes(b"never looked at")
    with pytest.raises(ConfigError, match="kv_lora_rank: got 40, expected a multiple of 16"):
        QuantizedModelAdapter.get_model(str(tmp_path), options=LoadOptions(kv_cache_dtype=mode))
