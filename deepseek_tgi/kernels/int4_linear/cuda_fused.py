"""Norm or gated activation in the kernel for few rows: one launch less. For more rows, one kernel after the other.

Every block does the row's work anew, in float32, and rounds to bfloat16 before the product, as the kernels in a row do.
The norm's factor of a row is applied to the sums instead of to x: a rounding in another place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import PackedInt4, describe, refuse
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.int4_linear import stream
from deepseek_tgi.kernels.int4_linear.cuda import Int4Ops, check_operands, in_vectors
from deepseek_tgi.kernels.int4_linear.fused import after_norm, after_silu
from deepseek_tgi.kernels.int4_linear.layout import CudaInt4
from deepseek_tgi.kernels.int4_linear.stream import StreamShape

if TYPE_CHECKING:
    from deepseek_tgi.kernels.int4_linear import NormInt4Linear, SiluInt4Linear
    from deepseek_tgi.kernels.select import KernelSet

_MAX_NORM_ROWS, _MAX_SILU_ROWS = 4, 4
"""Beyond, what every block reads and does for itself costs more than a kernel that does it once."""


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`; after all that bring `rms_norm`, `silu_mul` and `int4_linear`."""
    ops = getattr(kernels.int4_linear, "__self__", None)
    if not isinstance(ops, Int4Ops):
        raise BuildError("norm and activation go before INT4 products only with the products of CUDA C++")
    apart = after_norm(kernels.rms_norm, ops.int4_linear, kernels.activation_dtype)
    fused = FusedOps(ops, apart, after_silu(kernels.silu_mul, ops.int4_linear))
    return replace(kernels, norm_int4_linear=fused.norm_int4_linear, silu_int4_linear=fused.silu_int4_linear)


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The fused forms over `ops`; `norm_apart` and `silu_apart` take what the kernel does not."""

    ops: Int4Ops
    norm_apart: NormInt4Linear
    silu_apart: SiluInt4Linear

    def norm_int4_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        w: PackedInt4,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        shape = self._shape(w, x.shape[0], _MAX_NORM_ROWS)
        if shape is None or x.dtype != torch.float32:
            return self.norm_apart(x, norm_weight, eps, w, bias=bias, out=out)
        assert isinstance(w, CudaInt4)
        check_operands(x, w, bias, None, out)
        dense = norm_weight.dtype == torch.float32 and norm_weight.is_contiguous()
        if norm_weight.shape != (w.in_features,) or not dense:
            refuse(
                f"norm_int4_linear: got {describe('weight', norm_weight)}, expected [{w.in_features}] float32, dense"
            )
        y = fresh(x, w) if out is None else out
        stream.launch(self.ops.machine, shape, in_vectors(x), w, y, bias=bias, norm=(norm_weight, eps))
        return y

    def silu_int4_linear(
        self,
        gate_up: torch.Tensor,
        w: PackedInt4,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        shape = self._shape(w, gate_up.shape[0], _MAX_SILU_ROWS)
        if shape is None or (residual is not None and residual.dtype != torch.float32):
            return self.silu_apart(gate_up, w, bias, residual, out)
        assert isinstance(w, CudaInt4)
        k = w.in_features
        if gate_up.dim() != 2 or gate_up.shape[1] != 2 * k:
            refuse(f"silu_int4_linear: got {describe('gate_up', gate_up)}, expected [M, {2 * k}]")
        check_operands(gate_up[:, :k], w, bias, residual, out)
        y = fresh(gate_up, w) if out is None else out
        stream.launch(self.ops.machine, shape, in_vectors(gate_up), w, y, bias=bias, residual=residual, silu=True)
        return y

    def _shape(self, w: PackedInt4, rows: int, most: int) -> StreamShape | None:
        """How the kernel for few rows would cut the product, where it is the one."""
        if not isinstance(w, CudaInt4) or not 0 < rows <= most:
            return None
        choice = self.ops.chooser.choice(w, rows)
        return choice if isinstance(choice, StreamShape) else None


def fresh(x: torch.Tensor, w: PackedInt4) -> torch.Tensor:
    """A result for the rows of `x`."""
    return torch.empty(x.shape[0], w.out_features, dtype=torch.float32, device=x.device)
