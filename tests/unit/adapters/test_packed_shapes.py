"""Shapes worth measuring: those that loading really packs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_checkpoint

from deepseek_tgi.adapters import quantized
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.packed_shapes import int4_shapes
from deepseek_tgi.kernels.common import PackedInt4
from deepseek_tgi.kernels.select import KernelSet, select_kernels


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_are_the_shapes_that_loading_packs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path / family, family, "awq-gemm").path
    packed: set[tuple[int, int, int]] = set()

    def watched(*args: Any) -> KernelSet:
        kernels = select_kernels(*args)

        def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedInt4:
            packed.add((*codes.shape, group_size))
            return kernels.pack_int4(codes, zeros, scales, group_size)

        return replace(kernels, pack_int4=pack)

    monkeypatch.setattr(quantized, "select_kernels", watched)
    quantized.QuantizedModelAdapter.get_model(str(path), None, LoadOptions(device="cpu", kernels="torch"))
    assert packed
    assert int4_shapes(str(path)) == packed
