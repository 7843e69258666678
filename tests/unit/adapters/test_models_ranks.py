"""Two ranks against one: the same logits within rounding, the same bits on both ranks, for every family and format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinySpec
from ranks import FAMILIES, on_ranks, sharded, write_model
from stepper import Stepper, relative_error

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

TEXT = [(11 * i + 5) % 270 for i in range(40)]
CHUNKS = [17, 9]
SUM_ORDER = 2e-5
"""Float32 sums of a few hundred terms taken in another order, through two layers."""


def alone(folder: Path, **options: Any) -> torch.Tensor:
    adapter = QuantizedModelAdapter.get_model(str(folder), options=LoadOptions(dtype="float32", **options))
    return Stepper(adapter).run(TEXT, CHUNKS)


def together(folder: Path, world_size: int = 2, **options: Any) -> torch.Tensor:
    """Logits of rank 0, once every rank was seen to have the same bits."""
    with sharded(folder, world_size, dtype="float32", **options) as adapters:
        logits = on_ranks(world_size, lambda rank: Stepper(adapters[rank]).run(TEXT, CHUNKS))
    for other in logits[1:]:
        assert torch.equal(other, logits[0]), "ranks that differ by a bit choose other tokens one day"
    return logits[0]


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, name: str, kernels: str) -> None:
    write_model(tmp_path, FAMILIES[name])
    assert relative_error(together(tmp_path, kernels=kernels), alone(tmp_path, kernels=kernels)) <= SUM_ORDER


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", TinySpec("awq-gemm", group_size=128)),
        ("llama 9/3", TinySpec("awq-gemm", group_size=32)),
        ("qwen2", TinySpec("awq-gemm", group_size=-1, bias_scale=8.0)),
        ("qwen2", TinySpec("awq-gemv", group_size=64, bias_scale=8.0)),
        ("qwen3", TinySpec("compressed-tensors", group_size=32)),
        ("deepseek_v2", TinySpec("awq-gemm", group_size=64)),
        ("deepseek_v3", TinySpec("awq-gemm", group_size=32)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.quant}-{value.group_size}",
)
def test_quantised_weights_are_split_between_groups(tmp_path: Path, name: str, spec: TinySpec) -> None:
    write_model(tmp_path, FAMILIES[name], spec)
    assert relative_error(together(tmp_path, kernels="native"), alone(tmp_path, kernels="native")) <= SUM_ORDER


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_than_key_heads_or_an_odd_number(tmp_path: Path, world_size: int) -> None:
    name = "llama 9/3" if world_size == 3 else "llama"
    write_model(tmp_path, FAMILIES[name])
    assert (
        relative_error(together(tmp_path, world_size, kernels="torch"), alone(tmp_path, kernels="torch")) <= SUM_ORDER
    )
