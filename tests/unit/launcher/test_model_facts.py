"""What TGI's launcher derives from config.json, restated case by case from its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracles.published import PARAMETERS

from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.launcher import model_facts
from deepseek_tgi.launcher.model_facts import ModelFacts

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096}


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_fields_and_their_older_names(tmp_path: Path) -> None:
    facts = model_facts.read_facts(write(tmp_path, {"n_embd": 768, "num_attention_heads": 12, "n_positions": 1024}))
    assert (facts.head_dim, facts.max_position_embeddings, facts.known) == (64, 1024, True)


def test_a_given_head_dim_wins(tmp_path: Path) -> None:
    assert model_facts.read_facts(write(tmp_path, {**LLAMA, "head_dim": 80})).head_dim == 80


@pytest.mark.parametrize(
    ("method", "known"), [("awq", "awq"), ("compressed-tensors", "compressed-tensors"), ("x", None)]
)
def test_the_quantizer_is_the_models_own(method: str, known: str | None, tmp_path: Path) -> None:
    facts = model_facts.read_facts(write(tmp_path, {**LLAMA, "quantization_config": {"quant_method": method}}))
    assert facts.quant_method == known


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"hidden_size": "x", "num_attention_heads": 0}', "\x00"]
)
def test_a_config_that_makes_no_sense_is_left_to_the_shard(text: str, tmp_path: Path) -> None:
    assert model_facts.read_facts(write(tmp_path, text)).head_dim is None


def test_no_folder_no_facts(tmp_path: Path) -> None:
    assert not model_facts.read_facts(None).known
    assert not model_facts.read_facts(tmp_path).known


@pytest.mark.parametrize(
    ("facts", "lora", "capability", "attention", "caching"),
    [
        (ModelFacts(), False, 9, "flashinfer", "true"),
        (ModelFacts(head_dim=128, model_type="llama", known=True), False, None, "flashinfer", "true"),
        (ModelFacts(head_dim=128, model_type="llama", known=True), True, None, "flashinfer", "0"),
        (ModelFacts(head_dim=128, model_type="deepseek_v2", known=True), False, 9, "flashdecoding", "true"),
        (ModelFacts(head_dim=128, model_type="deepseek_v2", known=True), False, None, "paged", "0"),
        (ModelFacts(head_dim=40, model_type="deepseek_v2", known=True), False, 9, "flashdecoding", "0"),
        (ModelFacts(head_dim=56, model_type="deepseek_v3", known=True), False, None, "paged", "0"),
        (ModelFacts(head_dim=56, model_type="deepseek_v3", known=True), False, 7, "paged", "0"),
        (ModelFacts(head_dim=128, model_type="mllama", has_vision=True, known=True), False, 9, "flashinfer", "0"),
        (ModelFacts(known=True), False, None, "paged", "0"),
    ],
)
def test_attention_and_prefix_caching(
    facts: ModelFacts, lora: bool, capability: int | None, attention: str, caching: str
) -> None:
    got = model_facts.attention_environment(facts, lora, capability, {})
    assert got == {"ATTENTION": attention, "PREFIX_CACHING": caching}


@pytest.mark.parametrize(
    ("model", "head_dim", "with_gpu"),
    [
        # hidden_size / num_attention_heads, which is no width that such a model has: 2048/16, 5120/128, 7168/128.
        ("DeepSeek-V2-Lite", 128, {"ATTENTION": "flashdecoding", "PREFIX_CACHING": "true"}),
        ("DeepSeek-V2", 40, {"ATTENTION": "flashdecoding", "PREFIX_CACHING": "0"}),
        ("DeepSeek-V3", 56, {"ATTENTION": "flashdecoding", "PREFIX_CACHING": "0"}),
        ("R1-Distill-Llama-8B", 128, {"ATTENTION": "flashinfer", "PREFIX_CACHING": "true"}),
        ("SmolLM2-135M", 64, {"ATTENTION": "flashinfer", "PREFIX_CACHING": "true"}),
    ],
)
def test_facts_of_published_models(model: str, head_dim: int, with_gpu: dict[str, str], tmp_path: Path) -> None:
    fields, _ = PARAMETERS[model]
    facts = model_facts.read_facts(write(tmp_path, fields | {"quantization_config": {"quant_method": "fp8"}}))
    assert (facts.model_type, facts.head_dim, facts.quant_method) == (fields["model_type"], head_dim, "fp8")
    assert facts.max_position_embeddings == fields["max_position_embeddings"]
    assert model_facts.attention_environment(facts, False, 9, {}) == with_gpu
    latent = fields["model_type"].startswith("deepseek")
    without = {"ATTENTION": "paged", "PREFIX_CACHING": "0"} if latent else with_gpu
    assert model_facts.attention_environment(facts, False, None, {}) == without
    assert model_facts.prefill_tokens(LauncherConfig(), facts) == 4096


def test_what_the_user_set_is_kept() -> None:
    environ = {"ATTENTION": "paged", "PREFIX_CACHING": "true"}
    assert model_facts.attention_environment(ModelFacts(), False, None, environ) == environ
    only = model_facts.attention_environment(ModelFacts(), False, None, {"ATTENTION": "paged"})
    assert only["PREFIX_CACHING"] == "0"


@pytest.mark.parametrize(
    ("given", "positions", "tokens"), [(None, None, 4096), (None, 2048, 2048), (None, 131072, 4096), (9000, 2048, 9000)]
)
def test_prefill_tokens(given: int | None, positions: int | None, tokens: int) -> None:
    config = LauncherConfig(max_batch_prefill_tokens=given)
    assert model_facts.prefill_tokens(config, ModelFacts(max_position_embeddings=positions)) == tokens


@pytest.mark.parametrize(
    ("sharded", "num_shard", "count"), [(None, None, 1), (None, 3, 3), (False, None, 1), (False, 2, 2), (True, 2, 2)]
)
def test_number_of_ranks(sharded: bool | None, num_shard: int | None, count: int) -> None:
    assert model_facts.num_shards(LauncherConfig(sharded=sharded, num_shard=num_shard)) == count


@pytest.mark.parametrize(("sharded", "num_shard"), [(True, 1), (True, None), (None, 0), (False, 0)])
def test_contradictions_about_ranks_are_refused(sharded: bool | None, num_shard: int | None) -> None:
    with pytest.raises(ConfigError, match="--num-shard"):
        model_facts.num_shards(LauncherConfig(sharded=sharded, num_shard=num_shard))
