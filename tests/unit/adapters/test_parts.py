"""A rank's part of a stored layer: the same numbers as cut from the whole, and no more read than the part needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import TinySpec
from ranks import FAMILIES, write_model

from deepseek_tgi.adapters.awq import unpack
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.quantization import QuantPlan, resolve
from deepseek_tgi.adapters.weight_forms import Part

DOWN, QUERY = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"
SHAPES = {DOWN: (128, 384), QUERY: (128, 128)}
SPECS = [
    TinySpec(dtype=torch.float32),
    TinySpec("awq-gemm", group_size=32),
    TinySpec("awq-gemm", group_size=-1),
    TinySpec("awq-gemv", group_size=32),
    TinySpec("compressed-tensors", group_size=32),
    TinySpec("gptq", group_size=32),
    TinySpec("gptq", group_size=32, ordered=True),
    TinySpec("fp8", block=(64, 64)),
]


def opened(folder: Path, spec: TinySpec) -> QuantPlan:
    write_model(folder, FAMILIES["qwen2"], spec)
    return resolve(read_model_config(folder), Checkpoint(folder))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.quant}-{s.group_size}-{s.ordered}")
def test_a_part_is_the_whole_cut(tmp_path: Path, spec: TinySpec) -> None:
    plan = opened(tmp_path, spec)
    parts = {
        DOWN: [Part(range(128), range(128, 384)), Part(range(128), range(128)), Part(range(128), range(56, 120))],
        QUERY: [Part(range(32, 96), range(128)), Part(range(20, 25), range(128)), Part(range(8, 16), range(64, 128))],
    }
    for module, cuts in parts.items():
        whole = plan.linear(module, *SHAPES[module])
        for cut in cuts:
            part = plan.linear(module, *SHAPES[module], part=cut)
            rows = whole.dequantise()[cut.outputs.start : cut.outputs.stop]
            assert torch.equal(part.dequantise(), rows[:, cut.inputs.start : cut.inputs.stop]), (module, cut)
            if module == QUERY:
                assert part.bias is not None
                assert whole.bias is not None
                assert torch.equal(part.bias, whole.bias[cut.outputs.start : cut.outputs.stop])


@pytest.mark.parametrize("spec", SPECS[1:6], ids=lambda s: f"{s.quant}-{s.group_size}")
def test_only_the_words_of_a_part_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: TinySpec) -> None:
    plan, taken = opened(tmp_path, spec), []
    whole = unpack.unpack_words

    def counted(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        taken.append(words.numel() * 8)
        return whole(words, order)

    monkeypatch.setattr(unpack, "unpack_words", counted)
    plan.linear(DOWN, *SHAPES[DOWN], part=Part(range(64, 128), range(256, 384)))
    zeros = 64 * 8  # four groups, in whole words
    assert 64 * 128 <= sum(taken) <= 64 * 128 + zeros
