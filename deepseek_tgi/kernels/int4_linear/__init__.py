"""`x @ w.T` with an INT4 weight that stays INT4 in memory: `w = (codes - zeros) * scales`, asymmetric, grouped along K.

`int4_linear(x [M, K], w, bias [N] f32 | None, residual [M, N] | None, out [M, N] | None) -> [M, N]`: x activations,
residual and out the residual stream (f32) or activations; without `out` a fresh f32. Accumulates in float32; `M` may be
0; rows of `x` may lie apart, each dense; `out` may be `residual`. Weights enter the products exactly as stored; on a
GPU, beyond 32 rows and where it has little shared memory, rounded to bfloat16 once at most. Two fused forms give the
same bits as their parts, on a GPU the same to a rounding: `norm_int4_linear(x, norm_weight, eps, w)` is
`int4_linear(rms_norm(x), w)`, and `silu_int4_linear(gate_up [M, 2K], w)` is `int4_linear(silu_mul(gate_up), w)`.
Raises `GenerationError` for operands that do not fit, `ConfigError` from packing.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import PackedInt4

__all__ = ["Int4Linear", "NormInt4Linear", "PackInt4", "SiluInt4Linear"]


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


class NormInt4Linear(Protocol):
    """RMS norm and product in one call."""

    def __call__(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        w: PackedInt4,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class SiluInt4Linear(Protocol):
    """Gated activation and product in one call."""

    def __call__(
        self,
        gate_up: torch.Tensor,
        w: PackedInt4,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
