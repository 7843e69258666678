"""What stays out of low-bit keys: a bias that is large beside what keys vary by, and no more of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from key_bias import DIM, KV_HEADS, LAYERS, write_checkpoint
from safetensors.torch import load_file, save_file
from tiny_tokenizer import write_tokenizer

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.key_frames import bias_frame
from deepseek_tgi.adapters.layers.attention import Attention
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter


def test_pairs_that_are_small_beside_what_keys_vary_by_stay_in_the_keys() -> None:
    bias = torch.zeros(2, 8)
    bias[0, [1, 5]] = torch.tensor([30.0, 40.0])
    bias[:, [2, 6]] = 0.1
    none = bias_frame(bias * 0, 8, torch.tensor([1.0, 1.0]))
    assert none.centre is None
    frame = bias_frame(bias, 8, torch.tensor([1.0, 10.0]))
    assert frame.centre is not None
    assert frame.centre[0].nonzero().flatten().tolist() == [1, 5], "0.02 are less than a ten-thousandth of 2,500"
    assert frame.centre[1].nonzero().flatten().tolist() == [2, 6], "0.02 are more than a thousandth of 10"
    assert torch.equal(frame.centre[0, [1, 5]], bias[0, [1, 5]])
    wide = bias_frame(bias[1:], 8, torch.tensor([100.0]))
    assert wide.centre is None, "and less than a thousandth of 100"


@pytest.mark.parametrize(("size", "pairs"), [(1e-2, [DIM // 2 - 1]), (1e-3, [])])
def test_a_model_learns_from_its_weights_what_its_keys_vary_by(tmp_path: Path, size: float, pairs: list[int]) -> None:
    folder = write_checkpoint(tmp_path)
    write_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor.mul_(size)
    save_file(tensors, folder / "model.safetensors")
    options = LoadOptions(device="cpu", kernels="torch", dtype="float32", kv_cache_dtype="int8", num_threads=1)
    adapter = QuantizedModelAdapter.get_model(str(folder), options=options)
    layers = [part for part in adapter._decoder.parts if isinstance(part, Attention)]
    # Of a hidden state that points anywhere, a key's mean square is its row's own: 1.3 squared, of 64 elements 108. The
    # large pair has 2 (200 size) squared, 8 or 0.08; all others together 62 size squared.
    for part in layers:
        if pairs:
            assert part.frame is not None
            assert part.frame.centre is not None
            assert part.frame.centre[:, : DIM // 2].abs().gt(0).nonzero()[:, 1].tolist() == pairs * KV_HEADS
        else:
            assert part.frame is None
    assert len(layers) == LAYERS
