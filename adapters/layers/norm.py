"""RMS norm with its weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Kernel = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None], torch.Tensor]
"""`kernel(x, weight, eps, out)`."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32; `out` may be `x` itself."""

    kernel: Kernel
    weight: torch.Tensor
    eps: float

    @property
    def size(self) -> int:
        """Width of the last axis."""
        return int(self.weight.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.numel() * 4

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Norm of `x [T, n]` or `[T, heads, n]` into `out` of the same shape."""
        return self.kernel(x, self.weight, self.eps, out)
