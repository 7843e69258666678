"""Loading DeepSeek checkpoints: what is skipped by rule, what is missed by name, what a wrong file is told."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_checkpoint
from safetensors.torch import load_file, save_file
from stepper import Placed, Stepper
from torch.profiler import ProfilerActivity, profile

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.errors import CheckpointError

TEXT = [(11 * i + 5) % 270 for i in range(24)]
FURTHER = {"num_nextn_predict_layers": 1}


def load(path: Path, **options: Any) -> QuantizedModelAdapter:
    return QuantizedModelAdapter.get_model(str(path), options=LoadOptions(**{"dtype": "float32"} | options))


def change(path: Path, drop: str = "", added: dict[str, torch.Tensor] | None = None) -> None:
    """Rewrite the one file of a checkpoint without the names that begin with `drop` and with `added`."""
    file = path / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if not drop or not name.startswith(drop)}
    save_file(tensors | (added or {}), str(file))


@pytest.mark.parametrize("quant", [None, "awq-gemm"])
def test_layers_that_predict_further_tokens_are_skipped_and_take_no_memory(
    tmp_path: Path, quant: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tiny_checkpoint(tmp_path / "whole", "deepseek_v3", quant, config=FURTHER)
    extra = [name for name in load_file(whole.path / "model.safetensors") if name.startswith("model.layers.2.")]
    parts = {name.removeprefix("model.layers.2.").split(".")[0] for name in extra}
    assert parts >= {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head", "self_attn", "mlp"}
    with caplog.at_level(logging.INFO):
        adapter = load(whole.path)
    lines = [r.message for r in caplog.records if "skipped" in r.message]
    assert len(lines) == 1
    assert f"skipped {len(extra)} tensors: layers from 2 on predict further tokens" in lines[0]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert adapter.kv_layout.num_layers == 2
    tiny_checkpoint(tmp_path / "bare", "deepseek_v3", quant)
    change(whole.path, drop="model.layers.2.")
    assert load(whole.path).info.weight_bytes == adapter.info.weight_bytes == load(tmp_path / "bare").info.weight_bytes


def test_what_no_rule_skips_is_still_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_checkpoint(tmp_path, "deepseek_v3", config=FURTHER)
    unknown = ("model.layers.3.mlp.gate.weight", "model.layers.20.x", "model.layers.1.self_attn.indexer.wk.weight")
    change(tmp_path, added={name: torch.ones(4) for name in unknown})
    load(tmp_path)
    (line,) = [r.message for r in caplog.records if "no part of this model" in r.message]
    assert "ignored 3 tensors" in line
    assert all(name in line for name in unknown)


def test_a_further_layer_that_the_config_does_not_know_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v3", config=FURTHER)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config | {"num_nextn_predict_layers": 0}))
    load(tmp_path)
    assert [r.message for r in caplog.records if "no part of this model" in r.message]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.q_a_layernorm.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.5.down_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
    ],
)
@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_a_tensor_that_is_missing_or_misshapen_is_named(tmp_path: Path, name: str, fault: str) -> None:
    tiny_checkpoint(tmp_path, "deepseek_v3")
    if fault == "missing":
        change(tmp_path, drop=name)
    else:
        wrong = load_file(tmp_path / "model.safetensors")[name]
        change(tmp_path, added={name: torch.cat((wrong, wrong))})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_what_is_loaded_is_what_is_reported(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny_checkpoint(tmp_path, family, "awq-gemm")
    with caplog.at_level(logging.INFO):
        adapter = load(tmp_path, kernels="native")
    assert (adapter.info.model_type, adapter.info.quantization) == (family, "awq-gemm-g32")
    assert adapter.info.attention_impl == "paged-native"
    # Attention packs 4 modules of a layer, 5 with low-rank queries; the dense layer 3, eight experts and a shared one
    # 27; a router is dense.
    packed = 2 * (4 if family == "deepseek_v2" else 5) + 3 + 27
    (line,) = [r.message for r in caplog.records if f"loaded {family}, 2 layers" in r.message]
    assert f"1 dense, {packed} int4 modules" in line


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_decoding_step_allocates_nothing_for_its_layers(tmp_path: Path, family: str, batch: int) -> None:
    counts = []
    for layers in (2, 4):
        config = {"num_hidden_layers": layers}
        path = tiny_checkpoint(tmp_path / str(layers), family, "awq-gemm", config=config).path
        adapter = load(path, kernels="native", num_threads=1)
        stepper, requests = Stepper(adapter), [Placed() for _ in range(batch)]
        stepper.step([(request, TEXT) for request in requests])
        inputs = stepper.inputs([(request, [5]) for request in requests])
        adapter.step(inputs, stepper.pool)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            adapter.step(replace(inputs), stepper.pool)
        counts.append(sum(event.name == "[memory]" for event in seen.events() or ()))
    assert counts[0] == counts[1] > 0


PEAK = """
import sys, torch
from pathlib import Path
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

options = LoadOptions(dtype="float32", kernels=sys.argv[2], num_threads=2)
model = QuantizedModelAdapter.get_model(sys.argv[1], options=options)
model.forward(torch.ones(1, 8, dtype=torch.int64))
tokens = int(sys.argv[3])
ids = torch.arange(tokens).remainder(270).unsqueeze(0)
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
before = status("VmRSS")
model.forward(ids)
cache = model.kv_layout.bytes_per_block * -(-tokens // 16)
print(model.workspace_bytes(tokens, tokens) + cache, status("VmHWM") - before)
"""


@pytest.mark.parametrize(("kernels", "tokens"), [("native", 1500), ("torch", 600)])
def test_a_step_stays_within_its_workspace(tmp_path: Path, kernels: str, tokens: int) -> None:
    wide = {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048}
    path = tiny_checkpoint(tmp_path, "deepseek_v3", "awq-gemm", config=wide).path
    command = [sys.executable, "-c", PEAK, str(path), kernels, str(tokens)]
    promised, used = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert used <= promised, f"took {used / 1e6:.1f} MB, the workspace is said to be {promised / 1e6:.1f} MB"
    assert promised <= 3 * used, "a bound that is far off wastes cache"


def test_old_bytes_of_a_page_do_not_reach_the_logits(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "deepseek_v2")
    for kernels in ("native", "torch"):
        for mode in ("float32", "bfloat16", "fp8_e4m3fn", "int8", "int4"):
            adapter = load(tmp_path, kernels=kernels, kv_cache_dtype=mode, num_threads=1)
            clean, stale = Stepper(adapter), Stepper(adapter)
            stale.pool.storage.fill_(0xFF)  # NaN in every number format that has one
            assert torch.equal(stale.run(TEXT, [19]), clean.run(TEXT, [19])), (kernels, mode)
