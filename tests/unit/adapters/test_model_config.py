"""Reading `config.json`: each family and rope spelling, and one clear error for each way to be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepseek_tgi.adapters.model_config import RopeConfig, RopeKind, read_json, read_model_config
from deepseek_tgi.errors import CheckpointError, ConfigError, UnsupportedModelError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def read(folder: Path, text: str | None = None, /, **over: Any) -> Any:
    document = {key: value for key, value in {**BASE, **over}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(document) if text is None else text)
    return read_model_config(folder)


def test_defaults_are_upstreams(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.attention.num_key_value_heads == 4
    assert config.attention.head_dim == 16
    assert (config.attention.q_width, config.attention.kv_width) == (64, 64)
    assert (config.attention.qkv_bias, config.attention.output_bias, config.attention.qk_norm) == (False, False, False)
    assert (config.tie_word_embeddings, config.rms_norm_eps, config.mlp.bias) == (False, 1e-6, False)
    assert config.rope == RopeConfig(RopeKind.DEFAULT, 10_000.0)
    assert config.dtype is None
    assert config.quantization.method == "none"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_agrees_with_transformers_on_its_own_files(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {key: value for key, value in BASE.items() if key != "model_type"}
    theirs = AutoConfig.for_model(family, **sizes, num_key_value_heads=2, head_dim=32, rope_theta=5e5)
    theirs.save_pretrained(tmp_path)
    ours = read_model_config(tmp_path)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(ours.attention, name) == getattr(theirs, name)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] == 5e5
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "flag", "expected"),
    [
        ("llama", None, (False, False, False)),
        ("llama", True, (True, True, False)),
        ("qwen2", None, (True, False, False)),
        ("qwen3", None, (False, False, True)),
        ("qwen3", True, (True, True, True)),
    ],
)
def test_biases_and_norms_follow_the_family(
    family: str, flag: bool | None, expected: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    attention = read(tmp_path, model_type=family, attention_bias=flag).attention
    assert (attention.qkv_bias, attention.output_bias, attention.qk_norm) == expected


def test_qwen3_without_a_head_size_has_upstreams_128(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="qwen3").attention.head_dim == 128


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = [
    ({"rope_type": "default"}, RopeConfig(theta=5e5)),
    ({"rope_type": "linear", "factor": 2}, RopeConfig(RopeKind.LINEAR, 5e5, 2.0, 256)),
    ({"rope_type": "dynamic", "factor": 2.0}, RopeConfig(RopeKind.DYNAMIC, 5e5, 2.0, 256)),
    ({"rope_type": "llama3", **LLAMA3}, RopeConfig(RopeKind.LLAMA3, 5e5, 4.0, 64, 1.0, 4.0)),
    ({"rope_type": "yarn", **YARN}, RopeConfig(RopeKind.YARN, 5e5, 4.0, 64)),
    ({"rope_type": "yarn", "factor": 4.0}, RopeConfig(RopeKind.YARN, 5e5, 4.0, 256)),
    (
        {"rope_type": "yarn", "factor": None, **{"original_max_position_embeddings": 64}},
        RopeConfig(RopeKind.YARN, 5e5, 4.0, 64),
    ),
    (
        {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 0, "beta_fast": 16, "truncate": False},
        RopeConfig(RopeKind.YARN, 5e5, 4.0, 64, beta_fast=16.0, mscale=0.707, truncate=False),
    ),
]


@pytest.mark.parametrize("spelling", ["rope_scaling.rope_type", "rope_scaling.type", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "expected"), SCALINGS)
def test_both_spellings_of_rope_mean_the_same(
    spelling: str, scaling: dict[str, Any], expected: RopeConfig, tmp_path: Path
) -> None:
    if spelling == "rope_parameters":
        config = read(tmp_path, rope_parameters={"rope_theta": 5e5, **scaling})
    elif spelling == "rope_scaling.type":
        renamed = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
        config = read(tmp_path, rope_theta=5e5, rope_scaling=renamed)
    else:
        config = read(tmp_path, rope_theta=5e5, rope_scaling=scaling)
    assert config.rope == expected


def test_tgi_rope_overrides_replace_the_files(tmp_path: Path) -> None:
    config = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "yarn", **YARN})
    assert config.with_rope("dynamic", 3.0).rope == RopeConfig(RopeKind.DYNAMIC, 5e5, 3.0, 256)
    with pytest.raises(ConfigError, match="expected linear or dynamic"):
        config.with_rope("yarn", 2.0)
    with pytest.raises(ConfigError, match="at least 1"):
        config.with_rope("linear", float("nan"))


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"eos_token_id": 2, "bos_token_id": 1}, ((2,), 1, None)),
        ({"eos_token_id": [7, 2, 7], "pad_token_id": 3}, ((7, 2), None, 3)),
        ({"eos_token_id": None, "pad_token_id": -1}, ((), None, None)),
    ],
)
def test_special_ids_are_one_or_many_or_none(over: dict[str, Any], expected: object, tmp_path: Path) -> None:
    config = read(tmp_path, **over)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == expected


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": "auto"}, None),
        ({"torch_dtype": None}, None),
    ],
)
def test_dtype_is_read_in_every_spelling(over: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    assert read(tmp_path, **over).dtype == expected


@pytest.mark.parametrize(
    "over",
    [
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_window_that_is_not_active_is_no_obstacle(over: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, model_type="qwen2", **over).model_type == "qwen2"


@pytest.mark.parametrize(
    "over",
    [
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
    ],
)
def test_an_active_window_is_refused_by_name(over: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="sliding-window"):
        read(tmp_path, model_type="qwen2", **over)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not implemented; supported are llama, qwen2, qwen3"),
        (
            {"model_type": "deepseek_v32"},
            r"'deepseek_v32' is not implemented: it needs sparse attention .*; supp",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'; implemented are default, linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_is_not_implemented_is_refused_with_what_is(over: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **over)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"model_type": ...}, "model_type is missing; expected a string"),
        ({"hidden_size": ...}, "hidden_size is missing; expected an integer"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected an integer"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected an integer from 1"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000.*expected an integer"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; expected a divisor of num_attention_heads \(4\)"),
        ({"num_attention_heads": 3}, "hidden_size is 64; expected a multiple of num_attention_heads"),
        ({"head_dim": 15}, "head_dim is 15; expected an even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a finite number above 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*expected a finite number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; expected one of bfloat16, float16, float32"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected a token id"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor is 0.5; expected"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "above low_freq_factor"),
        ({"rope_theta": -1}, "rope_theta is -1; expected a finite number above 1"),
        ({"quantization_config": []}, r"quantization_config is \[\]; expected an object"),
    ],
)
def test_a_bad_value_names_key_got_and_expected(over: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, **over)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"a": NaN}', "[" * 100_000, '{"a": ' * 100_000, '{"hidden_size": 1' + "0" * 5000 + "}"],
)
def test_text_that_is_no_config_is_one_short_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, text)
    assert len(str(caught.value)) < 400


def test_bytes_that_are_no_text_and_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_model_config(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        read_model_config(tmp_path / "absent")


def test_an_oversized_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.json").write_text(" " * 200)
    with pytest.raises(CheckpointError, match="larger than 100 bytes"):
        read_json(tmp_path / "big.json", limit_bytes=100)
