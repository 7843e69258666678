"""Which form each request of a step is computed in, worked out for all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.latent_attention import PackedUp, takes_expanded

ROWS_AT_ONCE = 512
"""Rows of one launch of the decode kernel: bounds its workspace."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A request whose keys and values are made: its rows of the step, the pages of its context, that one's length."""

    rows: slice
    table: torch.Tensor
    length: int


@dataclass(frozen=True, slots=True)
class Single:
    """Rows that are absorbed, each over its own context: which they are, their block tables, their positions."""

    rows: slice | torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor


def split(inputs: ForwardInputs, form: str, up: PackedUp, rope_dim: int) -> tuple[Sequence[Whole], Sequence[Single]]:
    """The requests of a step by their forms."""
    starts, cached = inputs.host_lengths or (inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist())
    wholes: list[Whole] = []
    rows: list[tuple[int, int, int]] = []  # row of q, request, position
    for b in range(len(cached)):
        first, stop = starts[b], starts[b + 1]
        if takes_expanded(form, stop - first, cached[b], up, rope_dim):
            wholes.append(Whole(slice(first, stop), inputs.block_tables[b], cached[b] + stop - first))
        else:
            rows += [(t, b, cached[b] + t - first) for t in range(first, stop)]
    pieces = [rows[first : first + ROWS_AT_ONCE] for first in range(0, len(rows), ROWS_AT_ONCE)]
    return wholes, [_single(piece, inputs) for piece in pieces]


def _single(rows: Sequence[tuple[int, int, int]], inputs: ForwardInputs) -> Single:
    (first, owner, _), count = rows[0], len(rows)
    if all(row[:2] == (first + i, owner + i) for i, row in enumerate(rows)):  # neighbours of one token each: no copies
        owners = slice(owner, owner + count)
        return Single(slice(first, first + count), inputs.block_tables[owners], inputs.cache_lens[owners])
    which, owned, positions = torch.tensor(rows, device=inputs.block_tables.device).unbind(1)
    return Single(which, inputs.block_tables[owned], positions.int())
