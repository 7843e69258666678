"""The plan of a model on this machine: the cache it would get, what is asked for, what is refused, how it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_checkpoint
from oracles.published import R1_DISTILL_LLAMA_8B, V2_LITE, V3

from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.errors import ConfigError, UnsupportedModelError
from deepseek_tgi.kernels.peer_sizes import PeerSizes
from deepseek_tgi.launcher import plan as launcher_plan
from deepseek_tgi.launcher.plan import CachePlan, ModelPlan, make_plan
from deepseek_tgi.launcher.plan_text import plan_lines, plan_object

GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """A machine with so much free."""

    free: int

    def available_bytes(self) -> int:
        return self.free

    def resident_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


def plan_of(folder: Path, fields: dict[str, Any], free: int = 64 * GIB, **options: Any) -> ModelPlan:
    (folder / "config.json").write_text(json.dumps(fields))
    options = {"kernels": "reference", "dtype": "bfloat16"} | options
    return make_plan(LauncherConfig(model_id=str(folder), **options), Memory(free))


def cache(plan: ModelPlan, mode: str) -> CachePlan:
    (found,) = [each for each in plan.caches if each.mode == mode]
    return found


@pytest.mark.parametrize(
    ("mode", "layer_bytes"),
    # A latent of 512 and a rotary key of 64, which stays in bfloat16 where the latent is quantised. Scales: a float16
    # for each 128 (512 + 4 * 2 + 128), at INT4 a byte for each 32 (256 + 16 + 128).
    [("float32", 2304), ("bfloat16", 1152), ("float16", 1152), ("fp8_e4m3fn", 648), ("int8", 648), ("int4", 400)],
)
def test_bytes_a_token_of_a_latent_cache(mode: str, layer_bytes: int, tmp_path: Path) -> None:
    assert cache(plan_of(tmp_path, V2_LITE), mode).bytes_per_token == 27 * layer_bytes
    assert cache(plan_of(tmp_path, V3), mode).bytes_per_token == 61 * layer_bytes


def test_the_figures_that_the_readme_gives_of_v2_lite(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, V2_LITE)
    assert cache(plan, "bfloat16").bytes_per_token == 31_104
    assert cache(plan, "int4").bytes_per_token == 10_800
    assert plan.tgi.bytes_per_token == 331_776
    # A page of 16 tokens, rounded up to 4096 bytes.
    page = -(-31_104 * 16 // 4096) * 4096
    assert cache(plan, "bfloat16").tokens_per_gib == GIB // page * 16


def test_every_head_of_a_latent_cache_is_on_every_rank_and_heads_of_keys_are_dealt_out(tmp_path: Path) -> None:
    assert cache(plan_of(tmp_path, V2_LITE, num_shard=2), "bfloat16").bytes_per_token == 31_104
    llama = plan_of(tmp_path, R1_DISTILL_LLAMA_8B, num_shard=2)
    assert cache(llama, "bfloat16").bytes_per_token == 32 * 4 * 2 * 128 * 2


def test_this_machines_tokens_are_what_warm_up_would_settle_on(tmp_path: Path) -> None:
    from deepseek_tgi.adapters.base import LoadOptions
    from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
    from deepseek_tgi.engine.config import EngineConfig
    from deepseek_tgi.engine.warmup import Limits, cache_budget, plan_cache, workspace_bytes

    made = tiny_checkpoint(tmp_path / "model", "deepseek_v2", "awq-gemm")
    options = LoadOptions(dtype="float32", kernels="reference", kv_cache_dtype="int8")
    adapter = QuantizedModelAdapter.get_model(str(made.path), options=options)
    for free in (5_000_000, 6_000_000, 400 << 20):
        config = LauncherConfig(model_id=str(made.path), kernels="reference", dtype="float32", kv_cache_dtype="int8")
        got = cache(make_plan(config, Memory(free)), "int8")
        limits = Limits(None, min(4096, made.config["max_position_embeddings"]), None)
        work = workspace_bytes(adapter, limits, EngineConfig())
        budget = cache_budget(free + (40 << 20) - adapter.info.weight_bytes, work, EngineConfig())
        plan = plan_cache(adapter.kv_layout, limits, made.config["max_position_embeddings"], budget, EngineConfig())
        again = cache(make_plan(config, Memory(free + (40 << 20))), "int8")
        assert again.tokens_here == plan.result.max_supported_total_tokens
        assert got.in_use
        assert (got.tokens_here == 0) == bool(got.why)


def test_what_ranks_on_gpus_lend_each_other_is_no_room_for_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = PeerSizes(2).num_bytes
    (tmp_path / "config.json").write_text(json.dumps(R1_DISTILL_LLAMA_8B))
    config = LauncherConfig(model_id=str(tmp_path), num_shard=2, max_total_tokens=4096)

    def tokens(free: int) -> int:
        monkeypatch.setattr(launcher_plan, "gpus_for", lambda device, ranks: [free] * ranks)
        return cache(make_plan(config), "bfloat16").tokens_here

    found = tokens(24 * GIB)
    monkeypatch.setattr(launcher_plan, "lent_bytes", lambda world, on_gpus: 0)
    assert 0 < found == tokens(24 * GIB - lent) < tokens(24 * GIB)


def test_memory_that_is_asked_for_is_what_is_planned(tmp_path: Path) -> None:
    fields = R1_DISTILL_LLAMA_8B | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    got = cache(plan_of(tmp_path, fields, kv_memory=GIB, max_total_tokens=2048), "bfloat16")
    # 131072 bytes a token, and pages of 16 tokens need no rounding.
    assert got.tokens_here == got.tokens_per_gib == 8192
    short = cache(plan_of(tmp_path, fields, free=16 * GIB, kv_memory=12 * GIB), "bfloat16")
    assert short.tokens_here == 0
    assert "lower --kv-memory" in short.why


def test_the_tokenizers_own_limit_bounds_what_is_useful(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 4096}))
    fields = R1_DISTILL_LLAMA_8B | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    # Sixteen requests of full length, and the block that is kept for the liveness request.
    assert cache(plan_of(tmp_path, fields, free=1 << 40), "int8").tokens_here == 16 * 4096 + 16


def test_the_format_in_use_follows_the_options(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"kv_cache_dtype": "int8"}, "int8"),
        ({"kv_cache_dtype": "fp8_e4m3fn"}, "fp8_e4m3fn"),
    ]
    for options, mode in cases:
        assert [each.mode for each in plan_of(tmp_path, V2_LITE, **options).caches if each.in_use] == [mode]


def test_what_launching_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"deepseek_v32.*indexer"):
        plan_of(tmp_path, V3 | {"model_type": "deepseek_v32"})
    with pytest.raises(ConfigError, match="num_shard: got 17"):
        plan_of(tmp_path, V2_LITE, num_shard=17)
    with pytest.raises(ConfigError, match="--num-shard"):
        plan_of(tmp_path, V2_LITE, sharded=True)
    with pytest.raises(ConfigError, match="max_total_tokens"):
        plan_of(tmp_path, V2_LITE, max_total_tokens=10**6)


def test_the_text_names_what_the_object_holds(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, V2_LITE, num_shard=2)
    text = "\n".join(plan_lines(plan))
    assert "15,706,484,224 parameters" in text
    assert "config.json alone" in text
    (row,) = [line for line in text.splitlines() if line.startswith("model.layers.1-26.mlp.experts.0-63.down_proj")]
    assert row.split("  ")[-1].strip() == "9,596,567,552"
    assert "row by expert width: 2 x 704" in row
    (used,) = [line.split() for line in text.splitlines() if line.startswith("bfloat16 (in use)")]
    # 331,776 halved by two ranks over 31,104.
    assert used[3:5] == ["31,104", "5.3"]
    found = json.loads(json.dumps(plan_object(plan)))
    assert found["weights"]["parameters"] == 15_706_484_224
    assert found["caches"][1]["bytes_per_token"] == 31_104
    assert found["weights"]["ranks"][1]["stored_bytes"] == plan.weights.ranks[1].stored_bytes


def test_uneven_parts_are_told_one_by_one(tmp_path: Path) -> None:
    fields = V2_LITE | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    text = "\n".join(plan_lines(plan_of(tmp_path, fields, num_shard=2)))
    assert "row by expert width: 768 + 640" in text
    assert "\nrank 0 " in text
    assert "\nrank 1 " in text


def test_ranks_that_are_alike_are_told_once(tmp_path: Path) -> None:
    text = "\n".join(plan_lines(plan_of(tmp_path, V3, num_shard=8)))
    assert "\neach of ranks 0-7 " in text


def test_a_machine_too_small_is_told_and_not_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, V3, free=GIB)
    assert {each.tokens_here for each in plan.caches} == {0}
    (why,) = [line for line in plan_lines(plan) if line.startswith("does not fit here")]
    held = sum(rank.held_bytes for rank in plan.weights.ranks)
    assert f"the weights alone take {held} bytes, {GIB} are free" in why
