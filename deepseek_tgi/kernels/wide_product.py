"""Torch's product of bfloat16 operands with the sum kept in float32."""

from __future__ import annotations

import torch


def wide_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x weight^T` as float32, in `out` if given. Where torch only returns the operands' dtype, they are widened."""
    if x.dtype == torch.float32 or not x.is_cuda:
        y = torch.nn.functional.linear(x.float(), weight.float())
        return y if out is None else out.copy_(y)
    if out is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
