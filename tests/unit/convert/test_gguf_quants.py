"""Every readable GGUF block format against the `gguf` package's own dequantisation, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from deepseek_tgi.convert.gguf_quants import GGML_TYPES, UNREADABLE_NAMES, dequantise


def random_blocks(kind: gguf.GGMLQuantizationType, blocks: int) -> np.ndarray:
    """Random bytes whose float16 fields are finite, so that results can be compared exactly."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    octets = np.random.default_rng(int(kind)).integers(0, 256, (blocks, size), dtype=np.uint8)
    if size >= 18:
        # Exponent bits of every possible scale place: the first four and the last four bytes of a block.
        for place in (1, 3, size - 3, size - 1):
            octets[:, place] &= 0xBF
    return octets


@pytest.mark.parametrize("number", GGML_TYPES, ids=lambda n: GGML_TYPES[n].name)
def test_equals_the_reference_bit_for_bit(number: int) -> None:
    kind, ours = gguf.GGMLQuantizationType(number), GGML_TYPES[number]
    assert (ours.block_values, ours.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert ours.name == kind.name
    octets = random_blocks(kind, 37)
    expected = gguf.quants.dequantize(octets, kind).reshape(-1)
    got = dequantise(ours, torch.from_numpy(octets.reshape(-1)), torch.float32).numpy()
    # Bit patterns, since random F32 and BF16 bytes hold NaNs too.
    np.testing.assert_array_equal(got.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_pieces_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    octets = torch.from_numpy(random_blocks(gguf.GGMLQuantizationType.Q4_K, 11).reshape(-1))
    whole = dequantise(GGML_TYPES[12], octets, torch.float32)
    monkeypatch.setattr("deepseek_tgi.convert.gguf_quants._CHUNK_VALUES", 512)
    assert torch.equal(dequantise(GGML_TYPES[12], octets, torch.float32), whole)


def test_names_of_refused_formats_are_upstreams() -> None:
    for number, name in UNREADABLE_NAMES.items():
        assert gguf.GGMLQuantizationType(number).name == name
    assert not UNREADABLE_NAMES.keys() & GGML_TYPES.keys()
