"""Root-mean-square norm over the last axis: `x / sqrt(mean(x^2) + eps) * weight`, in float32.

`rms_norm(x [T, H] or [T, n, D] f32, weight [H or D] f32, eps, out | None) -> like x, contiguous unless out is given`.
The last axis is dense; rows may be strided (a view of a fused qkv buffer). `out` may be `x`.
Source: Zhang and Sennrich 2019, equation 4.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import describe, refuse

__all__ = ["RmsNorm", "check_rms_norm"]


class RmsNorm(Protocol):
    """See the module's docstring."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> None:
    """Raise `GenerationError` for operands that do not fit."""
    if not (x.dtype == torch.float32 and x.dim() in (2, 3) and (x.stride(-1) == 1 or x.shape[-1] == 1)):
        refuse(
            f"rms_norm: got {describe('x', x)} with strides {x.stride()}, "
            "expected [T, H] or [T, n, D] float32, last axis dense"
        )
    if not (weight.dtype == torch.float32 and tuple(weight.shape) == (x.shape[-1],)):
        refuse(f"rms_norm: got {describe('weight', weight)}, expected [{x.shape[-1]}] float32")
    if out is not None and not (out.shape == x.shape and out.dtype == torch.float32 and out.stride(-1) == 1):
        refuse(f"rms_norm: got {describe('out', out)}, expected {list(x.shape)} float32")
