"""Every format with every family: logits against `transformers` with the weights the files stand for, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from stepper import Stepper, relative_error

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

TOLERANCE = 1e-4
"""Float32 sums in another order give 3e-6; a wrong zero, group, block or order 1e-2 and more."""
TEXT = [(11 * i + 5) % 270 for i in range(40)]
FAMILIES = ("llama", "qwen2", "deepseek_v2", "deepseek_v3")
FORMATS: dict[str, dict[str, Any]] = {
    "gptq-symmetric": {"quant": "gptq", "zero_point": False},
    "gptq-asymmetric": {"quant": "gptq"},
    "gptq-row": {"quant": "gptq", "group_size": -1},
    "gptq-ordered": {"quant": "gptq", "ordered": True},
    "gptq-v2-ordered-symmetric": {"quant": "gptq_v2", "ordered": True, "zero_point": False},
    "gptq-v2": {"quant": "gptq_v2", "group_size": 64},
    "fp8": {"quant": "fp8"},
    "fp8-ue8m0": {"quant": "fp8-ue8m0", "block": (48, 40)},
    "fp8-e8m0": {"quant": "fp8-e8m0"},
    "fp8-row": {"quant": "fp8-row"},
    "ct-fp8": {"quant": "ct-fp8"},
    "ct-ordered": {"quant": "ct-ordered"},
    "ct-ordered-symmetric": {"quant": "ct-ordered", "zero_point": False},
    "ct-row": {"quant": "compressed-tensors", "group_size": -1, "zero_point": False},
}


def load(checkpoint: TinyCheckpoint, **options: Any) -> QuantizedModelAdapter:
    wished: dict[str, Any] = {"dtype": "float32", "num_threads": 1} | options
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=LoadOptions(**wished))


@torch.no_grad()
def reference(checkpoint: TinyCheckpoint) -> torch.Tensor:
    return checkpoint.reference()(torch.tensor([TEXT])).logits[0]


def stepped(adapter: QuantizedModelAdapter) -> torch.Tensor:
    """A prompt across a block edge, then token by token across another."""
    return Stepper(adapter).run(TEXT, [21, *[1] * 18])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_are_those_of_the_dequantised_weights(tmp_path: Path, family: str, name: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, family, bias_scale=10.0, **FORMATS[name])
    assert relative_error(stepped(load(checkpoint)), reference(checkpoint)) <= TOLERANCE


@pytest.mark.parametrize("name", ["gptq-ordered", "fp8"])
@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_every_set_of_kernels_reads_the_formats(tmp_path: Path, kernels: str, name: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v2", **FORMATS[name])
    got = Stepper(load(checkpoint, kernels=kernels)).run(TEXT[:9], [8])
    assert relative_error(got, reference(checkpoint)[:9]) <= TOLERANCE
