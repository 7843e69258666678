"""Root-mean-square norm over the last axis: `x / sqrt(mean(x^2) + eps) * weight`, in float32.

`rms_norm(x [T, H] or [T, n, D], weight [H or D] f32, eps, out | None) -> like x, contiguous unless out is given`.
The last axis is dense; rows may be strided (a view of a fused qkv buffer). `out` may be `x`. x and out are the residual
stream (f32) or activations, each of its own dtype.
Source: Zhang and Sennrich 2019, equation 4.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import FLOAT32, Dtypes, describe, named, refuse

__all__ = ["RmsNorm", "check_rms_norm"]


class RmsNorm(Protocol):
    """See the module's docstring."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, dtypes: Dtypes = FLOAT32) -> None:
    """Raise `GenerationError` for operands that do not fit."""
    if not (x.dtype in dtypes and x.dim() in (2, 3) and (x.stride(-1) == 1 or x.shape[-1] == 1)):
        refuse(
            f"rms_norm: got {describe('x', x)} with strides {x.stride()}, "
            f"expected [T, H] or [T, n, D] {named(dtypes)}, last axis dense"
        )
    if not (weight.dtype == torch.float32 and tuple(weight.shape) == (x.shape[-1],)):
        refuse(f"rms_norm: got {describe('weight', weight)}, expected [{x.shape[-1]}] float32")
    if out is not None and not (out.shape == x.shape and out.dtype in dtypes and out.stride(-1) == 1):
        refuse(f"rms_norm: got {describe('out', out)}, expected {list(x.shape)} {named(dtypes)}")
