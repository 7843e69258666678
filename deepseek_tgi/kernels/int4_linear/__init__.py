"""`x @ w.T` with an INT4 weight that stays INT4 in memory: `w = (codes - zeros) * scales`, asymmetric, grouped along K.

`int4_linear(x [M, K] f32, w, bias [N] f32 | None, residual [M, N] f32 | None, out [M, N] f32 | None) -> [M, N] f32`.
Accumulates in float32; `M` may be 0; `out` may be `residual`. Weights enter the products exactly as stored.
Raises `GenerationError` for operands that do not fit, `ConfigError` from packing.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import PackedInt4

__all__ = ["Int4Linear", "PackInt4"]


class PackInt4(Protocol):
    """Rearranges a checkpoint's INT4 weight; the arguments are not kept."""

    def __call__(
        self, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> PackedInt4: ...


class Int4Linear(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        x: torch.Tensor,
        w: PackedInt4,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
