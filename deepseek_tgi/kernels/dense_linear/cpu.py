"""Dense linear with torch's own matrix product, the weight stored in the compute dtype.

FP8 weights stay FP8 and are widened a tile of output features at a time.
"""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import (
    ACTIVATIONS,
    ComputeDtype,
    PackedDense,
    PlainDense,
    PlainFp8,
    check_dense,
    check_linear,
    finish_linear,
)
from deepseek_tgi.kernels.dense_linear import PackDense, PackFp8

_TILE_ELEMENTS = 1 << 20


class TorchDense(PlainDense):
    """A contiguous copy in bfloat16 or float32."""

    __slots__ = ()


class TorchFp8(PlainFp8):
    """A copy as stored; `dtype` is the one it is multiplied in."""

    __slots__ = ("dtype",)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, block: int, dtype: torch.dtype) -> None:
        super().__init__(codes, scales, block)
        self.dtype = dtype

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [M, K]` times the weight, `[M, N] float32`."""
        y = x.new_empty((x.shape[0], self.out_features), dtype=torch.float32)
        cast = x.to(self.dtype)
        step = max(16, _TILE_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            stop = min(start + step, self.out_features)
            y[:, start:stop] = cast @ self.tile(start, stop).to(self.dtype).t()
        return y


def packer(compute_dtype: ComputeDtype) -> PackDense:
    """The packing function for `compute_dtype`."""
    dtype = torch.bfloat16 if compute_dtype is ComputeDtype.BFLOAT16 else torch.float32

    def pack_dense(weight: torch.Tensor, *, exact: bool = False) -> PackedDense:
        check_dense(weight)
        return TorchDense(weight.to(torch.float32 if exact else dtype, copy=True).contiguous())

    return pack_dense


def fp8_packer(compute_dtype: ComputeDtype) -> PackFp8:
    """The packing function of FP8 weights for `compute_dtype`."""
    dtype = torch.bfloat16 if compute_dtype is ComputeDtype.BFLOAT16 else torch.float32

    def pack_fp8(codes: torch.Tensor, scales: torch.Tensor, block: int) -> PackedDense:
        return TorchFp8(codes, scales, block, dtype)

    return pack_fp8


def dense_linear(
    x: torch.Tensor,
    w: PackedDense,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    check_linear(x, w, bias, residual, out, dtypes=ACTIVATIONS)
    if isinstance(w, TorchFp8):
        return finish_linear(w.multiply(x), bias, residual, out)
    assert isinstance(w, TorchDense)
    # The product's output is rounded to the weight's dtype; float32 accumulation inside is torch's own.
    y = torch.nn.functional.linear(x.to(w.weight.dtype), w.weight).float()
    return finish_linear(y, bias, residual, out)
