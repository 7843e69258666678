"""The mixture of experts as a part of a model: what its router sees, how its weights are held, where it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from safetensors.torch import load_file, save_file
from stepper import Stepper

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.errors import CheckpointError

TEXT = [(11 * i + 5) % 270 for i in range(24)]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def load(checkpoint: TinyCheckpoint, **options: Any) -> QuantizedModelAdapter:
    wished: dict[str, Any] = {"dtype": "float32", "num_threads": 1} | options
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=LoadOptions(**wished))


def change(checkpoint: TinyCheckpoint, changed: dict[str, torch.Tensor]) -> None:
    file = checkpoint.path / "model.safetensors"
    save_file(load_file(file) | changed, str(file))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_router_sees_all_bits_of_its_weights_in_bfloat16(tmp_path: Path, kernels: str) -> None:
    """Rows that are one in bfloat16 and differ below: rounded, every token would tie and take 0 and 1."""
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v2", dtype=torch.float32, config={"num_experts_per_tok": 2})
    gate = torch.randn(1, checkpoint.config["hidden_size"]).repeat(8, 1).bfloat16().float()
    gate[2:4] *= 1 + 2**-10
    gate[4:6] *= 1 - 2**-10
    change(checkpoint, {"model.layers.1.mlp.gate.weight": gate})
    with_all = Stepper(load(checkpoint, dtype="bfloat16", kernels=kernels)).run(TEXT, [24])
    tied = [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (0, 1, 6, 7)]
    change(checkpoint, {name: torch.zeros_like(checkpoint.dense[name]) for name in tied})
    without = Stepper(load(checkpoint, dtype="bfloat16", kernels=kernels)).run(TEXT, [24])
    # The tied experts lie between the others, whatever the logit's sign: no token takes them.
    assert torch.equal(with_all, without)


def test_ordered_experts_stay_in_four_bits(tmp_path: Path) -> None:
    plain = load(tiny_checkpoint(tmp_path / "plain", "deepseek_v3", "gptq"), kernels="native")
    ordered = load(tiny_checkpoint(tmp_path / "ordered", "deepseek_v3", "gptq", ordered=True), kernels="native")
    # An order of int64 for each of 9 experts' input, for q_a with kv_a, q_b and o_proj of 2 layers, and the dense MLP.
    assert ordered.info.weight_bytes - plain.info.weight_bytes < 30 * 8 * 192


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_correction_bias_that_cannot_rank_is_refused_by_name(tmp_path: Path, bad: float) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v3")
    change(checkpoint, {BIAS: torch.full((8,), bad)})
    with pytest.raises(CheckpointError, match=BIAS.replace(".", r"\.")):
        load(checkpoint)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_old_bytes_of_scratch_do_not_reach_the_logits(tmp_path: Path, kernels: str) -> None:
    adapter = load(tiny_checkpoint(tmp_path, "deepseek_v3", "awq-gemm"), kernels=kernels)
    first = Stepper(adapter).run(TEXT, [20])
    adapter._decoder._scratch._memory.fill_(float("nan"))
    assert torch.equal(Stepper(adapter).run(TEXT, [20]), first)


PEAK = """
import sys, torch
from pathlib import Path
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.models.decoder import Scratch
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.adapters.workspace import StepSizes

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def through_experts(tokens):
    scratch, hidden = Scratch([part], torch.device("cpu")), torch.randn(tokens, 512)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = status("VmRSS")
    part(hidden, scratch.cut(tokens)[0], None)
    sizes = StepSizes(scratch.floats, 512, 270, sys.argv[2] == "native")
    return sizes.bytes_of(tokens, 0), status("VmHWM") - before

options = LoadOptions(dtype="bfloat16", kernels=sys.argv[2], num_threads=2)
part = QuantizedModelAdapter.get_model(sys.argv[1], options=options)._decoder._weights.parts[-1]
through_experts(8)
print(*through_experts(int(sys.argv[3])))
"""


@pytest.mark.parametrize(("kernels", "tokens"), [("native", 1500), ("torch", 300)])
def test_a_step_through_experts_stays_within_its_workspace(tmp_path: Path, kernels: str, tokens: int) -> None:
    shape = {"hidden_size": 512, "moe_intermediate_size": 384, "n_routed_experts": 12, "num_experts_per_tok": 6}
    path = tiny_checkpoint(tmp_path, "deepseek_v2", "awq-gemm", config=shape).path
    command = [sys.executable, "-c", PEAK, str(path), kernels, str(tokens)]
    promised, used = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert used <= promised, f"took {used / 1e6:.1f} MB, the workspace is said to be {promised / 1e6:.1f} MB"
    assert kernels != "native" or promised <= 1.5 * used, "a bound that is far off wastes cache"
