"""Rectangles to ragged steps, by hand-worked numbers."""

from __future__ import annotations

import torch

from deepseek_tgi.adapters.ragged import pack


def test_padding_on_either_side_and_empty_rows_are_packed_away() -> None:
    ids = torch.tensor([[9, 9, 5, 6], [7, 9, 9, 9], [9, 9, 9, 9], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    batch = pack(ids, mask, vocab_size=10, block_size=2)
    inputs = batch.inputs
    assert inputs.input_ids.tolist() == [5, 6, 7, 1, 2, 3, 4]
    assert inputs.positions.tolist() == [0, 1, 0, 0, 1, 2, 3]
    assert inputs.cu_seqlens.tolist() == [0, 2, 3, 7]
    # Blocks of 2 slots: request 0 has block 0, request 1 block 1, request 3 blocks 2 and 3.
    assert inputs.slots.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert [row[:n] for row, n in zip(inputs.block_tables.tolist(), (1, 1, 2), strict=True)] == [[0], [1], [2, 3]]
    assert batch.num_blocks == 4
    assert inputs.cache_lens.tolist() == [0, 0, 0]
    assert inputs.logit_rows.tolist() == list(range(7))
    assert (inputs.max_seqlen, inputs.max_context) == (4, 4)
    for tensor in (inputs.positions, inputs.cu_seqlens, inputs.block_tables, inputs.cache_lens):
        assert tensor.dtype == torch.int32


def test_logits_go_back_to_their_places() -> None:
    mask = torch.tensor([[0, 1], [1, 1]])
    batch = pack(torch.zeros(2, 2, dtype=torch.int64), mask, vocab_size=3, block_size=16)
    spread = batch.spread(torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]))
    assert spread.tolist() == [[[0, 0, 0], [1, 2, 3]], [[4, 5, 6], [7, 8, 9]]]


def test_a_gap_in_the_mask_does_not_count_as_a_position() -> None:
    batch = pack(torch.tensor([[5, 0, 6]]), torch.tensor([[True, False, True]]), vocab_size=10, block_size=16)
    assert batch.inputs.input_ids.tolist() == [5, 6]
    assert batch.inputs.positions.tolist() == [0, 1]
