"""The measure of held-out text, against the loss that `transformers` reports."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from builders import tiny_checkpoint
from held_out import held_windows, loss_on, outside_turns, windows

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
    got = loss_on(adapter, KVMode.FLOAT32, windows(IDS, 64), chunk=24)
    assert got.num_tokens == count == 147
    assert got.nats == pytest.approx(total / count, rel=1e-5)


def test_what_a_user_says_does_not_count() -> None:
    # Marks 1 and 2: from the user's on, up to and with the assistant's.
    assert outside_turns(1, 2)([0, 1, 5, 6, 2, 7, 8, 9, 1, 4]) == [*[True], *[False] * 4, *[True] * 3, *[False] * 2]
    assert outside_turns(1, 2)([4, 2, 5]) == [True] * 3


def test_windows_of_token_files(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        (tmp_path / f"held-{name}.bin").write_bytes(array("H", range(first, first + 50)).tobytes())
    assert held_windows(tmp_path, 10, 45) == [
        [*range(10)], [*range(10, 20)], [*range(100, 110)], [*range(110, 120)],
    ]  # fmt: skip
