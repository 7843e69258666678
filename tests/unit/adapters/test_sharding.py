"""How a model is dealt out to ranks: judged from the config alone, by hand-worked examples and by what must add up."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_config
from ranks import FAMILIES, V2, V3, write_model

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.json_fields import Fields
from deepseek_tgi.adapters.model_config import GroupedQueryAttention, ModelConfig, parse_model_config
from deepseek_tgi.adapters.module_table import Axis, ModuleSpec, Side, module_table
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.adapters.sharding import ShardPlan, plan_shards
from deepseek_tgi.errors import ConfigError


def awq(group_size: int, **more: Any) -> dict[str, Any]:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return {"quantization_config": settings | more}


def config_of(values: dict[str, Any], folder: Path = Path("/model")) -> ModelConfig:
    return parse_model_config(Fields("config.json", json.loads(json.dumps(values))), folder)


def module(config: ModelConfig, suffix: str) -> ModuleSpec:
    return next(m for m in module_table(config) if m.name.endswith(suffix))


def inputs(plan: ShardPlan, suffix: str) -> list[tuple[int, int]]:
    spec = module(plan.config, suffix)
    return [(r.start, r.stop) for r in (plan.inputs(spec, rank) for rank in range(plan.world_size))]


def outputs(plan: ShardPlan, suffix: str) -> list[tuple[int, int]]:
    spec = module(plan.config, suffix)
    return [(r.start, r.stop) for r in (plan.outputs(spec, rank) for rank in range(plan.world_size))]


def counts(config: ModelConfig, limit: int) -> list[int]:
    """The numbers of ranks below `limit` that are not refused."""
    works = []
    for world_size in range(1, limit):
        with suppress(ConfigError):
            works.append(plan_shards(config, world_size).world_size)
    return works


def test_an_odd_number_of_groups_is_split_unevenly_between_whole_groups() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    three = plan_shards(config_of(tiny_config("llama", **sizes) | awq(128)), 2)
    assert inputs(three, "mlp.down_proj") == [(0, 256), (256, 384)]
    assert outputs(three, "mlp.gate_proj") == outputs(three, "mlp.up_proj") == [(0, 256), (256, 384)]
    six = plan_shards(config_of(tiny_config("llama", **sizes) | awq(64)), 2)
    assert inputs(six, "mlp.down_proj") == [(0, 192), (192, 384)]


def test_each_tensor_of_a_mixture_of_experts_is_judged_on_its_own() -> None:
    plan = plan_shards(config_of(V2 | awq(64)), 2)
    assert inputs(plan, "layers.0.mlp.down_proj") == [(0, 192), (192, 320)], "five groups: three and two"
    assert inputs(plan, "experts.3.down_proj") == [(0, 64), (64, 128)]
    assert inputs(plan, "shared_experts.down_proj") == [(0, 128), (128, 256)]
    assert inputs(plan, "self_attn.o_proj") == [(0, 64), (64, 128)]
    assert outputs(plan, "self_attn.q_proj") == [(0, 96), (96, 192)]
    assert outputs(plan, "self_attn.kv_b_proj") == [(0, 128), (128, 256)]
    for whole in ("kv_a_proj_with_mqa", "mlp.gate", "kv_a_layernorm", "input_layernorm"):
        assert module(plan.config, whole).rule == "replicated"
        assert len(set(outputs(plan, whole))) == 1


def test_what_cannot_be_split_is_named_with_the_counts_that_work() -> None:
    config = config_of(V2 | awq(64))
    assert counts(config, 5) == [1, 2]
    with pytest.raises(ConfigError) as caught:
        plan_shards(config, 4)
    text = str(caught.value)
    assert text.startswith("num_shard: got 4, expected 1 or 2: /model/config.json: ")
    assert "model.layers.0.self_attn.o_proj has 128 inputs of 4 heads in groups of 64" in text
    assert "model.layers.1.mlp.experts.0.down_proj has 128 inputs in groups of 64" in text
    assert "q_a_proj" not in text
    assert "shared_experts" not in text, "four groups: that one fits"
    assert "layers.0.mlp.down_proj" not in text


def test_one_group_over_the_whole_input_side_leaves_the_cuts_free() -> None:
    config = config_of(tiny_config("llama") | awq(-1))
    assert inputs(plan_shards(config, 2), "mlp.down_proj") == [(0, 192), (192, 384)]
    assert inputs(plan_shards(config, 2), "o_proj") == [(0, 64), (64, 128)]


def test_modules_kept_dense_put_no_demand_on_the_cuts() -> None:
    kept = awq(128, modules_to_not_convert=["mlp"])
    assert inputs(plan_shards(config_of(tiny_config("llama") | kept), 2), "mlp.down_proj") == [(0, 192), (192, 384)]
    packed = config_of(tiny_config("llama") | awq(128))
    assert inputs(plan_shards(packed, 2), "mlp.down_proj") == [(0, 256), (256, 384)]


def test_query_heads_go_with_their_key_head() -> None:
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    plan = plan_shards(config_of(tiny_config("llama", **sizes)), 2)
    assert outputs(plan, "q_proj") == [(0, 384), (384, 576)]
    assert outputs(plan, "k_proj") == outputs(plan, "v_proj") == [(0, 128), (128, 192)]
    assert inputs(plan, "o_proj") == [(0, 384), (384, 576)]
    local = [plan.local(rank).attention for rank in range(2)]
    assert all(isinstance(spec, GroupedQueryAttention) for spec in local)
    assert [(a.num_attention_heads, a.num_key_value_heads) for a in local if isinstance(a, GroupedQueryAttention)] == [
        (6, 2),
        (3, 1),
    ]


def test_more_ranks_than_key_heads_share_them() -> None:
    config = config_of(tiny_config("llama", num_attention_heads=12, num_key_value_heads=2, hidden_size=192))
    plan = plan_shards(config, 4)
    assert outputs(plan, "q_proj") == [(0, 48), (48, 96), (96, 144), (144, 192)]
    assert outputs(plan, "k_proj") == [(0, 16), (0, 16), (16, 32), (16, 32)]
    assert counts(config, 14) == [1, 2, 4, 6, 8, 10, 12]
    with pytest.raises(ConfigError, match=r"q_proj has 192 outputs of 12 heads and 2 K/V heads.*3 ranks"):
        plan_shards(config, 3)


def test_a_refusal_says_of_each_module_what_it_has() -> None:
    config = config_of(tiny_config("llama", vocab_size=12, num_attention_heads=4, num_key_value_heads=2))
    with pytest.raises(ConfigError) as caught:
        plan_shards(config, 16)
    reasons = str(caught.value).partition("config.json: ")[2].split("; ")
    assert reasons[0] == "model.embed_tokens has 12 outputs"
    assert reasons[1].startswith("model.layers.0.self_attn.q_proj has 128 outputs of 4 heads and 2 K/V heads: a cut")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("quantisation", [{}, awq(32), awq(-1)], ids=["dense", "g32", "channel"])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_all_ranks_make_up_each_module_and_respect_its_grid(
    name: str, quantisation: dict[str, Any], world_size: int
) -> None:
    config = config_of(FAMILIES[name] | quantisation)
    if world_size not in counts(config, world_size + 1):
        assert world_size > 2, "two ranks share every model here"
        return
    plan = plan_shards(config, world_size)
    for spec in module_table(config):
        for side, width in ((Side.OUT, spec.out_features), (Side.IN, spec.in_features)):
            cut = plan.outputs if side is Side.OUT else plan.inputs
            parts = [cut(spec, rank) for rank in range(world_size)]
            if spec.split is None or spec.split.side is not side:
                assert parts == [range(width)] * world_size
                continue
            assert all(parts), "nobody stands idle"
            assert all(p.start % spec.split.unit == p.stop % spec.split.unit == 0 for p in parts), "whole heads"
            if spec.split.axis is not Axis.KV_HEADS or world_size <= 2:
                assert [0, *(p.stop for p in parts)] == [*(p.start for p in parts), width], "no hole, no overlap"
            if side is Side.IN and quantisation == awq(32):
                assert all(p.start % 32 == 0 for p in parts), "whole quantisation groups"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v2", "deepseek_v3"])
def test_the_local_config_has_the_widths_of_the_parts(name: str, world_size: int) -> None:
    plan = plan_shards(config_of(FAMILIES[name]), world_size)
    for rank in range(world_size):
        local = {m.name: m for m in module_table(plan.local(rank))}
        for spec in module_table(plan.config):
            own = (len(plan.outputs(spec, rank)), len(plan.inputs(spec, rank)))
            if spec.split is None or spec.split.axis is not Axis.VOCABULARY:
                assert (local[spec.name].out_features, local[spec.name].in_features) == own, spec.name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_differ_by_no_more_than_one_step(world_size: int) -> None:
    config = config_of(tiny_config("llama", num_key_value_heads=1, intermediate_size=400))
    widths = [stop - start for start, stop in inputs(plan_shards(config, world_size), "down_proj")]
    assert max(widths) - min(widths) <= 16


def test_a_table_of_many_experts_is_made_quickly_enough_to_print() -> None:
    config = config_of(V3 | {"n_routed_experts": 256, "num_hidden_layers": 61, "first_k_dense_replace": 3})
    names = [m.name for m in module_table(config)]
    assert len(names) == len(set(names))
    assert sum(".experts." in name for name in names) == 58 * 256 * 3


@pytest.mark.parametrize("name", FAMILIES)
def test_loading_asks_for_exactly_the_modules_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_model(tmp_path, FAMILIES[name])
    left: list[str] = []
    monkeypatch.setattr(Checkpoint, "finish", lambda self: left.extend(self.unused()))
    QuantizedModelAdapter.get_model(str(tmp_path), options=LoadOptions(kernels="torch"))
    assert left == [], "the table names nothing that loading does not read"
