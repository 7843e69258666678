"""INT4 weights of a layer's experts as the GPU's kernels read them: tiles of 16 outputs by 64 inputs in lane order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4, check_int4
from deepseek_tgi.kernels.moe import Expert, Packed

TILE, CHUNK = 16, 64


@runtime_checkable
class HasTensors(Protocol):
    """A packed INT4 weight that can be given back as it was stored."""

    def tensors(self) -> Int4Tensors: ...


class LooseInt4(PackedInt4):
    """An expert's INT4 weight as it was read, on its way to `pack_experts`, which lays it out by itself."""

    __slots__ = ("_read",)

    def __init__(self, read: Int4Tensors) -> None:
        n, k = read.codes.shape
        super().__init__(n, k, read.group_size, read.codes.nbytes + read.zeros.nbytes + read.scales.nbytes)
        self._read = read

    def tensors(self) -> Int4Tensors:
        """As it was read."""
        return self._read

    def dequantise(self) -> torch.Tensor:
        """See `PackedInt4`."""
        read = self._read
        grouped = read.codes.view(self.out_features, -1, self.group_size).float() - read.zeros.float().unsqueeze(-1)
        return (grouped * read.scales.float().unsqueeze(-1)).view(self.out_features, self.in_features)


def hold_int4(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedInt4:
    """See `KernelSet.hold_int4`."""
    return LooseInt4(check_int4(codes, zeros, scales, group_size))


@dataclass(frozen=True, slots=True)
class TiledInt4:
    """INT4 weights of several matrices of one shape, as `sources/int4_tile.cuh` reads them.

    Shapes: `codes [matrices, N/16, K/64, 32, 4] int32`, `scales [matrices, N/16, K/group, 16] int32`: the lower half
    the bits of a scale, of `scale_dtype`, the upper those of the bfloat16 `128 + zero`. N is padded to 16, K to 64,
    with weights that are 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    scale_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.codes.nbytes + self.scales.nbytes


def tiled(tensors: Int4Tensors, rows: int, columns: int, scale_dtype: torch.dtype) -> TiledInt4:
    """One matrix in tiles, padded to `rows` and `columns`, multiples of 16 and 64; `scale_dtype` holds its scales."""
    n, k = tensors.codes.shape
    size = tensors.group_size
    zeros = torch.nn.functional.pad(tensors.zeros, (0, columns // size - k // size, 0, rows - n))
    scales = torch.nn.functional.pad(tensors.scales.to(scale_dtype), (0, columns // size - k // size, 0, rows - n))
    codes = torch.nn.functional.pad(tensors.codes, (0, columns - k, 0, rows - n))
    parts = codes.view(rows // TILE, 2, 8, columns // CHUNK, 4, 4, 4).to(torch.int64)  # tile, half, g, chunk, s, t, j
    shifts = torch.tensor([[0, 16, 8, 24], [4, 20, 12, 28]], dtype=torch.int64, device=codes.device)
    words = (parts << shifts.view(1, 2, 1, 1, 1, 1, 4)).sum((1, 6))  # tile, g, chunk, s, t
    words = words.permute(0, 2, 1, 4, 3).reshape(rows // TILE, columns // CHUNK, 32, 4)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    offsets = (zeros.float() + 128.0).bfloat16().view(torch.int16).to(torch.int32) << 16
    pairs = offsets | (scales.view(torch.int16).to(torch.int32) & 0xFFFF)
    pairs = pairs.view(rows // TILE, TILE, columns // size).transpose(1, 2)
    return TiledInt4(words, pairs.contiguous(), size, scale_dtype)


def stacked(weights: Sequence[TiledInt4]) -> TiledInt4:
    """Several matrices of one shape as one weight."""
    codes, scales = torch.stack([w.codes for w in weights]), torch.stack([w.scales for w in weights])
    return TiledInt4(codes, scales, weights[0].group_size, weights[0].scale_dtype)


def take_turns(gate: TiledInt4, up: TiledInt4) -> TiledInt4:
    """Tiles of gate and up in turns, so that one block makes both halves of its outputs."""
    codes, scales = (
        torch.stack((a, b), 1).flatten(0, 1) for a, b in ((gate.codes, up.codes), (gate.scales, up.scales))
    )
    return TiledInt4(codes, scales, gate.group_size, gate.scale_dtype)


def parts(expert: Expert, first: int, last: int) -> tuple[Int4Tensors, Int4Tensors, Int4Tensors]:
    """Gate, up and down of the expert's inner elements `first` to `last`, a cut between groups."""
    assert isinstance(expert.gate_up, HasTensors)
    assert isinstance(expert.down, HasTensors)
    both, down = expert.gate_up.tensors(), expert.down.tensors()
    size = down.group_size
    gate, up = (_rows(both, slice(at + first, at + last)) for at in (0, expert.inner_size))
    groups = slice(first // size, -(-last // size))
    below = Int4Tensors(down.codes[:, first:last], down.zeros[:, groups], down.scales[:, groups], size)
    return gate, up, below


def _rows(tensors: Int4Tensors, rows: slice) -> Int4Tensors:
    return Int4Tensors(tensors.codes[rows], tensors.zeros[rows], tensors.scales[rows], tensors.group_size)


def wide(packed: Packed) -> torch.Tensor:
    return packed.dequantise() if isinstance(packed, PackedInt4) else packed.dense()


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
