"""INT4 weights of a layer's experts, as they were read and as kernels read them: in the products' own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4, check_int4
from deepseek_tgi.kernels.int4_linear.layout import pack
from deepseek_tgi.kernels.moe import Expert, Packed

TILE, CHUNK = 16, 64
SCALE_KINDS = {torch.float16: 1, torch.bfloat16: 2}
"""As `sources/int4_weight.cuh` numbers them."""


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
    """INT4 weights of several matrices of one shape, one after the other, as `int4_linear/layout.py` lays out each.

    Shapes: `codes [matrices, N/16, K/64, 32, 4] int32`, `metas [matrices, N/16, K/group, 8, 2, 1] int32`, with scales
    of 16 bits. N is padded to 64, K to 64 and the group, with weights that are 0.
    """

    codes: torch.Tensor
    metas: torch.Tensor
    group_size: int
    scale_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.codes.nbytes + self.metas.nbytes


def tiled(tensors: Int4Tensors, columns: int, scale_dtype: torch.dtype) -> TiledInt4:
    """One matrix, its inputs padded to `columns`, a multiple of the group; `scale_dtype` holds its scales."""
    k, size = tensors.codes.shape[1], tensors.group_size
    zeros, scales = (torch.nn.functional.pad(t, (0, (columns - k) // size)) for t in (tensors.zeros, tensors.scales))
    codes = torch.nn.functional.pad(tensors.codes, (0, columns - k))
    packed = pack(codes, zeros, scales, size)
    metas = packed.metas
    if packed.scale_kind != SCALE_KINDS[scale_dtype]:  # float16 holds these as well
        wide = (metas & 0xFFFF).to(torch.int16).view(torch.float16)
        bits = wide.to(scale_dtype).view(torch.int16).to(torch.int32) & 0xFFFF
        metas = (metas & ~0xFFFF) | bits
    return TiledInt4(packed.codes, metas, size, scale_dtype)


def stacked(weights: Sequence[TiledInt4]) -> TiledInt4:
    """Several matrices of one shape as one weight."""
    codes, metas = torch.stack([w.codes for w in weights]), torch.stack([w.metas for w in weights])
    return TiledInt4(codes, metas, weights[0].group_size, weights[0].scale_dtype)


def parts(expert: Expert, first: int, last: int, inner: int) -> tuple[Int4Tensors, Int4Tensors]:
    """Gate over up, and down, of the expert's inner elements `first` to `last`, a cut between groups.

    Both halves of gate over up are padded to `inner` rows, in which codes and zeros are 0.
    """
    assert isinstance(expert.gate_up, HasTensors)
    assert isinstance(expert.down, HasTensors)
    both, down = expert.gate_up.tensors(), expert.down.tensors()
    size, missing = down.group_size, inner - (last - first)
    halves = [slice(at + first, at + last) for at in (0, expert.inner_size)]
    codes, zeros, scales = (
        torch.cat([torch.nn.functional.pad(t[rows], (0, 0, 0, missing)) for rows in halves])
        for t in (both.codes, both.zeros, both.scales)
    )
    groups = slice(first // size, -(-last // size))
    below = Int4Tensors(down.codes[:, first:last], down.zeros[:, groups], down.scales[:, groups], size)
    return Int4Tensors(codes, zeros, scales, both.group_size), below


def wide(packed: Packed) -> torch.Tensor:
    return packed.dequantise() if isinstance(packed, PackedInt4) else packed.dense()


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
