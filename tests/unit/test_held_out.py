"""The measure of held-out text, against the loss that `transformers` reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import tiny_checkpoint
from held_out import loss_on

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.kv.layout import KVMode

IDS = [(13 * i * i + 7 * i + 3) % 300 for i in range(150)]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@torch.no_grad()
def test_the_loss_is_the_models_own_over_windows(family: str, tmp_path: Path) -> None:
    made = tiny_checkpoint(tmp_path / "model", family)
    adapter = QuantizedModelAdapter.get_model(str(made.path), options=LoadOptions(dtype="float32", num_threads=1))
    model, total, count = made.reference(), 0.0, 0
    for start in range(0, len(IDS), 64):
        piece = torch.tensor([IDS[start : start + 64]])
        total += float(model(piece, labels=piece).loss) * (piece.shape[1] - 1)
        count += piece.shape[1] - 1
    got = loss_on(adapter, KVMode.FLOAT32, IDS, window=64, chunk=24)
    assert got.num_tokens == count == 147
    assert got.nats == pytest.approx(total / count, rel=1e-5)
