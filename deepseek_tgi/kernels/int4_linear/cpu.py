"""INT4 linear with torch's own operators, for machines without a C++ compiler.

Choice: nibbles stay packed, two to a byte, and are unpacked a tile of output features at a time, so that the temporary
stays in cache-sized pieces whatever the model. In bfloat16, weights whose shape torch's `_weight_int4pack_mm_for_cpu`
takes are held in its packing instead: it is several times faster for a few rows. That operator rounds scales to
bfloat16, up to 2**-8 of each weight, on top of the activations' own rounding. Rejected: keeping both packings.
"""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import (
    ACTIVATIONS,
    ComputeDtype,
    Int4Tensors,
    PackedInt4,
    check_int4,
    check_linear,
    finish_linear,
    on_host,
)
from deepseek_tgi.kernels.int4_linear import PackInt4

_TILE_ELEMENTS = 1 << 20
_OP_GROUP_SIZES = frozenset({32, 64, 128, 256})
_OP_N_MULTIPLE = 16


class NibbleInt4(PackedInt4):
    """Two codes a byte along K (low nibble first), zeros as float32 offsets, scales as stored."""

    __slots__ = ("codes", "dtype", "scales", "zeros")

    def __init__(self, tensors: Int4Tensors, dtype: torch.dtype) -> None:
        out_features, in_features = tensors.codes.shape
        codes = torch.nn.functional.pad(tensors.codes, (0, in_features % 2))
        self.codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        self.zeros = tensors.zeros.clone()
        self.scales = tensors.scales.clone()
        self.dtype = dtype
        parts = (self.codes, self.zeros, self.scales)
        super().__init__(out_features, in_features, tensors.group_size, sum(p.nbytes for p in parts))

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start:stop` as float32 `[rows, K]`."""
        packed = self.codes[start:stop]
        codes = torch.stack((packed & 15, packed >> 4), -1).view(packed.shape[0], -1)[:, : self.in_features]
        grouped = codes.view(codes.shape[0], -1, self.group_size).float()
        grouped -= self.zeros[start:stop].float().unsqueeze(-1)
        grouped *= self.scales[start:stop].float().unsqueeze(-1)
        return grouped.view(codes.shape[0], -1)

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`."""
        return self.tile(0, self.out_features)


class OperatorInt4(PackedInt4):
    """The packing of `_weight_int4pack_mm_for_cpu`, which computes `(code - 8) * scale + offset`."""

    __slots__ = ("packed", "scale_and_offset")

    def __init__(self, tensors: Int4Tensors) -> None:
        out_features, in_features = tensors.codes.shape
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(tensors.codes.int(), 1)
        scales = tensors.scales.float()
        offsets = (8.0 - tensors.zeros.float()) * scales
        self.scale_and_offset = torch.stack((scales.t(), offsets.t()), -1).to(torch.bfloat16).contiguous()
        nbytes = self.packed.nbytes + self.scale_and_offset.nbytes
        super().__init__(out_features, in_features, tensors.group_size, nbytes)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [M, K] bfloat16` times the weight, `[M, N] float32`."""
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, self.group_size, self.scale_and_offset
        )
        return product.float()

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`, as the operator sees it."""
        return self.multiply(torch.eye(self.in_features, dtype=torch.bfloat16)).t().contiguous()


def _operator_takes(tensors: Int4Tensors) -> bool:
    fits = tensors.group_size in _OP_GROUP_SIZES and tensors.codes.shape[0] % _OP_N_MULTIPLE == 0
    return fits and on_host(tensors.codes)


def packer(compute_dtype: ComputeDtype) -> PackInt4:
    """The packing function for `compute_dtype`."""
    dtype = torch.bfloat16 if compute_dtype is ComputeDtype.BFLOAT16 else torch.float32

    def pack_int4(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedInt4:
        tensors = check_int4(codes, zeros, scales, group_size)
        if dtype is torch.bfloat16 and _operator_takes(tensors):
            return OperatorInt4(tensors)
        return NibbleInt4(tensors, dtype)

    return pack_int4


def int4_linear(
    x: torch.Tensor,
    w: PackedInt4,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    check_linear(x, w, bias, residual, out, dtypes=ACTIVATIONS)
    if isinstance(w, OperatorInt4):
        y = w.multiply(x.to(torch.bfloat16)) if x.shape[0] else x.new_zeros((0, w.out_features), dtype=torch.float32)
        return finish_linear(y, bias, residual, out)
    assert isinstance(w, NibbleInt4)
    y = x.new_empty((x.shape[0], w.out_features), dtype=torch.float32)
    cast = x.to(w.dtype)
    step = max(16, _TILE_ELEMENTS // w.in_features)
    for start in range(0, w.out_features, step):
        stop = min(start + step, w.out_features)
        y[:, start:stop] = cast @ w.tile(start, stop).to(w.dtype).t()
    return finish_linear(y, bias, residual, out)
