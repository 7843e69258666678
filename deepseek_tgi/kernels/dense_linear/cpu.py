"""Dense linear with torch's own matrix product, the weight stored in the compute dtype."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import ComputeDtype, PackedDense, PlainDense, check_dense, check_linear, finish_linear
from deepseek_tgi.kernels.dense_linear import PackDense


class TorchDense(PlainDense):
    """A contiguous copy in bfloat16 or float32."""

    __slots__ = ()


def packer(compute_dtype: ComputeDtype) -> PackDense:
    """The packing function for `compute_dtype`."""
    dtype = torch.bfloat16 if compute_dtype is ComputeDtype.BFLOAT16 else torch.float32

    def pack_dense(weight: torch.Tensor) -> PackedDense:
        check_dense(weight)
        return TorchDense(weight.to(dtype, copy=True).contiguous())

    return pack_dense


def dense_linear(
    x: torch.Tensor,
    w: PackedDense,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    assert isinstance(w, TorchDense)
    check_linear(x, w, bias, residual, out)
    # The product's output is rounded to the weight's dtype; float32 accumulation inside is torch's own.
    y = torch.nn.functional.linear(x.to(w.weight.dtype), w.weight).float()
    return finish_linear(y, bias, residual, out)
