"""A checkpoint that somebody cuts short while it is read: an error that names it, not the end of the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builders import tiny_checkpoint

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.errors import CheckpointError


@pytest.mark.parametrize("quant", [None, "awq-gemm"])
def test_a_file_that_is_cut_between_two_layers_is_an_error(tmp_path: Path, quant: str | None) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama", quant, shards=2).path
    heard: list[float] = []

    def cut(percent: float) -> None:
        heard.append(percent)
        for file in folder.glob("*.safetensors"):
            os.truncate(file, 4096)

    options = LoadOptions(device="cpu", kernels="torch", num_threads=1, report=cut)
    with pytest.raises(CheckpointError, match=r"\.safetensors: was cut to 4096 bytes while it was read; it had \d+"):
        QuantizedModelAdapter.get_model(str(folder), options=options)
    assert len(heard) == 1
