"""The fused forms made of their parts, for sets that have no kernel for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import PackedInt4
from deepseek_tgi.kernels.int4_linear import Int4Linear, NormInt4Linear, SiluInt4Linear

if TYPE_CHECKING:
    from deepseek_tgi.kernels.rms_norm import RmsNorm
    from deepseek_tgi.kernels.silu_mul import SiluMul


def after_norm(rms_norm: RmsNorm, int4_linear: Int4Linear, dtype: torch.dtype = torch.float32) -> NormInt4Linear:
    """`int4_linear(rms_norm(x), w)`, what is between them in `dtype`."""

    def norm_int4_linear(
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        w: PackedInt4,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        between = None if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
        return int4_linear(rms_norm(x, norm_weight, eps, between), w, bias, None, out)

    return norm_int4_linear


def after_silu(silu_mul: SiluMul, int4_linear: Int4Linear) -> SiluInt4Linear:
    """`int4_linear(silu_mul(gate_up), w)`."""

    def silu_int4_linear(
        gate_up: torch.Tensor,
        w: PackedInt4,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return int4_linear(silu_mul(gate_up), w, bias, residual, out)

    return silu_int4_linear
