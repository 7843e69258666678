"""An INT4 weight re-laid for CUDA: one form for every number of rows, as `cuda/sources/int4_weight.cuh` tells it.

Choice: the weight is the matrix instructions' register operand, so it is stored in the order of that operand's lanes
and needs no shuffles on its way. A scale keeps 16 bits where that is exact, with its zero beside it in one word.
Rejected: a second copy for many rows (memory); scales folded into the codes (one more rounding of every weight).
"""

from __future__ import annotations

from typing import Any

import torch

from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4, check_int4
from deepseek_tgi.kernels.quant_layout import exact_scales

TILE_ROWS = 16
UNIT_ROWS = 64
"""Rows are padded to whole units, of which a warpgroup takes one."""
CHUNK = 64
GROUP_SIZES = (128, 64, 32)
_ZERO_BITS = 0x4300
_NARROW = {1: torch.float16, 2: torch.bfloat16}
_TILES_AT_ONCE = 1 << 22


class CudaInt4(PackedInt4):
    """Codes `[tiles, chunks, 32, 4] int32` and groups `[tiles, groups, 8, 2, 1 or 2] int32` on the device.

    `group` is the kernels' group size: it divides the checkpoint's, whose scales are repeated. `scale_kind` is 0 for
    float32 scales, 1 for float16, 2 for bfloat16. `plans` is what launches worked out about the weight, by whatever
    decides it.
    """

    __slots__ = ("chunks", "codes", "group", "metas", "plans", "scale_kind")

    def __init__(self, codes: torch.Tensor, metas: torch.Tensor, shape: tuple[int, int, int], scale_kind: int) -> None:
        out_features, in_features, group_size = shape
        self.codes, self.metas, self.scale_kind = codes, metas, scale_kind
        self.plans: dict[Any, Any] = {}
        self.chunks = codes.shape[1]
        self.group = self.chunks * CHUNK // metas.shape[1]
        super().__init__(out_features, in_features, group_size, codes.nbytes + metas.nbytes)

    def tensors(self) -> Int4Tensors:
        """The weight as it was packed, read back."""
        n, k, tiles = self.out_features, self.in_features, self.codes.shape[0]
        words = self.codes.view(tiles, self.chunks, 8, 4, 4, 1, 1, 1)  # tile, chunk, g, t, step; half, far, odd
        two = torch.arange(2, dtype=torch.int32, device=words.device)
        shift = 4 * two.view(2, 1, 1) + 8 * two.view(2, 1) + 16 * two
        codes = ((words >> shift) & 15).to(torch.uint8)
        codes = codes.permute(0, 5, 2, 1, 4, 6, 3, 7).reshape(tiles * TILE_ROWS, -1)[:n, :k]
        metas = self.metas.permute(0, 3, 2, 1, 4).flatten(0, 2)[:n]  # [N, groups, words]
        metas = metas[:, : k // self.group : self.group_size // self.group]
        zeros = (((metas[..., -1] >> 16) & 0xFF) - (_ZERO_BITS & 0xFF)).to(torch.uint8)
        bits = metas[..., 0].contiguous()
        scales = bits.view(torch.float32) if self.scale_kind == 0 else bits.view(_NARROW[self.scale_kind])[:, ::2]
        return Int4Tensors(codes.contiguous(), zeros, scales.contiguous(), self.group_size)

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`, read back from the packed form."""
        read = self.tensors()
        codes = read.codes.view(self.out_features, -1, self.group_size).float()
        weight = (codes - read.zeros.float().unsqueeze(-1)) * read.scales.float().unsqueeze(-1)
        return weight.view(self.out_features, self.in_features)


def kernel_group(group_size: int) -> int | None:
    """The largest group the kernels know that divides `group_size`; None if there is none."""
    return next((group for group in GROUP_SIZES if group_size % group == 0), None)


def refusal(tensors: Int4Tensors) -> str | None:
    """Why the kernels cannot take a weight; None if they can."""
    if kernel_group(tensors.group_size) is None:
        return f"group size {tensors.group_size} is no multiple of {GROUP_SIZES[-1]}"
    return None


def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> CudaInt4:
    """Re-lay a weight that `refusal` does not refuse, on the device it is on; temporaries stay small beside it."""
    tensors = check_int4(codes, zeros, scales, group_size)
    group = kernel_group(group_size)
    assert group is not None
    kind, exact = exact_scales(tensors.scales)
    n, k = codes.shape
    stage = max(group, CHUNK)
    chunks, rows = -(-k // stage) * (stage // CHUNK), -(-n // UNIT_ROWS) * UNIT_ROWS
    packed = torch.empty(rows // TILE_ROWS, chunks, 32, 4, dtype=torch.int32, device=codes.device)
    step = max(1, _TILES_AT_ONCE // (chunks * CHUNK * UNIT_ROWS)) * UNIT_ROWS
    for row in range(0, rows, step):
        some = tensors.codes[row : row + step]
        padded = torch.nn.functional.pad(some, (0, chunks * CHUNK - k, 0, min(step, rows - row) - some.shape[0]))
        packed[row // TILE_ROWS : (row + step) // TILE_ROWS] = _in_lanes(padded)
    groups = chunks * CHUNK // group
    meta = _words(kind, exact, tensors.zeros).repeat_interleave(group_size // group, 1)
    pad = (0, 0, 0, groups - meta.shape[1], 0, rows - n)
    meta = torch.nn.functional.pad(meta, pad).view(-1, 2, 8, groups, meta.shape[2])
    metas = meta.permute(0, 3, 2, 1, 4).contiguous()  # [tiles, groups, g, half, words]
    return CudaInt4(packed, metas, (n, k, group_size), kind)


def _words(kind: int, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """`[N, groups, 1 or 2] int32`: scale and zero in one word, or each in its own."""
    high = (_ZERO_BITS | zeros.to(torch.int32)) << 16
    if kind == 0:
        return torch.stack((scales.contiguous().view(torch.int32), high), -1)
    return ((scales.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF) | high).unsqueeze(-1)


def _in_lanes(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[rows, K] uint8` as `[tiles, chunks, 32, 4] int32`."""
    rows, k = codes.shape
    parts = codes.view(rows // TILE_ROWS, 2, 8, k // CHUNK, 4, 2, 4, 2)  # tile, half, g, chunk, step, far, t, odd
    nibbles = parts[:, 0] | (parts[:, 1] << 4)  # tile, g, chunk, step, far, t, odd
    words = nibbles.permute(0, 2, 1, 5, 3, 6, 4).contiguous()  # tile, chunk, g, t, step, odd, far: four bytes a word
    return words.flatten(-2).view(torch.int32).view(rows // TILE_ROWS, k // CHUNK, 32, 4)
