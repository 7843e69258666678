"""`x @ w.T` with a dense weight (layers kept out of quantisation, the output head) or one of 8-bit floats in blocks.

`dense_linear(x [M, K], w, bias [N] f32 | None, residual [M, N] | None, out [M, N] | None) -> [M, N]`: x activations,
residual and out the residual stream (f32) or activations; without `out` a fresh f32. Accumulates in float32; `M` may be
0; `out` may be `residual`. Storage is bfloat16 or float32 as `pack_dense` decides from the compute dtype (float32
compute never stores less than the checkpoint does; an `exact` weight keeps every bit whatever the compute dtype, and so
do its products' activations). `pack_fp8` keeps codes at one byte a weight; they enter the products exactly, `w = code *
scale`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import PackedDense

__all__ = ["DenseLinear", "PackDense", "PackFp8"]


class PackDense(Protocol):
    """Rearranges a dense weight `[N, K]`; the argument is not kept."""

    def __call__(self, weight: torch.Tensor, *, exact: bool = False) -> PackedDense: ...


class PackFp8(Protocol):
    """Rearranges `codes [N, K] float8_e4m3fn` (none of them NaN) with `scales [N, ceil(K / block)] float32`."""

    def __call__(self, codes: torch.Tensor, scales: torch.Tensor, block: int) -> PackedDense: ...


class DenseLinear(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        x: torch.Tensor,
        w: PackedDense,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
