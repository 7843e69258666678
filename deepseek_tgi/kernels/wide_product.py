"""Torch's product of bfloat16 operands with the sum kept in float32."""

from __future__ import annotations

import torch


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x weight^T` as float32. Where torch can only return the operands' dtype, they are widened first."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return torch.nn.functional.linear(x.float(), weight.float())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
