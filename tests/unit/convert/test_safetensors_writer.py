"""The streaming writer, held to the safetensors library."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from deepseek_tgi.convert.safetensors_writer import PlannedTensor, SafetensorsWriter


def test_a_tensor_that_is_not_contiguous_is_written_whole(tmp_path: Path) -> None:
    # Large enough that the memory of a copy that nobody keeps is unmapped at once.
    turned = torch.arange(4_000_000, dtype=torch.float32).view(2000, 2000).t()
    plan = [PlannedTensor("turned", torch.float32, (2000, 2000)), PlannedTensor("none", torch.float16, (0, 4))]
    with SafetensorsWriter(tmp_path / "m.safetensors", plan) as writer:
        writer.write(turned)
        writer.write(torch.empty(0, 4, dtype=torch.float16))
    read = load_file(tmp_path / "m.safetensors")
    assert torch.equal(read["turned"], turned)
    assert read["none"].shape == (0, 4)
