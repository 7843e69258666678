"""Stored tensors on their way to where they are unpacked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import tiny_checkpoint

from deepseek_tgi.adapters import transfer
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.transfer import ReadAhead, Transfer


@pytest.mark.parametrize("shape", [(0,), (), (1,), (7, 3), (1000,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.uint8])
def test_pieces_add_up(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 64)
    stored = torch.randint(0, 100, shape).to(dtype)
    move = Transfer(torch.device("cpu"))
    moved = move(stored)
    assert moved.dtype == dtype
    assert torch.equal(moved, stored)
    assert moved.data_ptr() != stored.data_ptr() or not stored.numel()
    assert move.num_bytes == stored.nbytes


def test_a_checkpoint_gives_what_was_moved(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "llama", "awq-gemm").path
    plain, moved = Checkpoint(folder), Checkpoint(folder, Transfer(torch.device("cpu")))
    for name in plain.names():
        assert torch.equal(moved.tensor(name), plain.tensor(name))


def test_reading_ahead_ends_by_itself_or_when_told(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "missing", tmp_path / "b"]
    files[0].write_bytes(b"x" * 100)
    ahead = ReadAhead(files)
    ahead._thread.join(10)
    assert not ahead._thread.is_alive()
    ahead = ReadAhead([files[0]] * 1000)
    ahead.stop()
    assert not ahead._thread.is_alive()
