"""Dense linear on a GPU: torch's own products, their sums kept in float32, and a kernel for few rows of exact weights.

Choice: bfloat16 weights go through cuBLAS with float32 results, which costs nothing and keeps a head's logits whole.
Exact float32 weights are multiplied in float32 proper; for a decode step's few rows by a kernel of ours, since a small
weight is then a matter of launches. FP8 weights stay FP8 and are widened to bfloat16 for a product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import (
    ACTIVATIONS,
    ComputeDtype,
    PackedDense,
    PlainDense,
    PlainFp8,
    check_dense,
    check_linear,
    finish_linear,
)
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.machine import Machine, machine_of
from deepseek_tgi.kernels.cuda.program import spec
from deepseek_tgi.kernels.wide_product import wide_product

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

_SOURCE = "dense_rows"
_SIGNATURE = "plppppiii"
_THREADS = 256
_MAX_ROWS = 32


class CudaDense(PlainDense):
    """A contiguous copy in bfloat16, or float32 where every bit counts."""

    __slots__ = ()


class CudaFp8(PlainFp8):
    """A copy as stored."""

    __slots__ = ()


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`."""
    if kernels.compute_dtype is ComputeDtype.FLOAT32:
        raise BuildError("dense products on a GPU are of bfloat16 activations, and float32 compute was asked for")
    ops = DenseOps(machine_of(kernels.device))
    packer = Packer(kernels.device)
    return replace(kernels, pack_dense=packer.pack_dense, pack_fp8=packer.pack_fp8, dense_linear=ops.dense_linear)


@dataclass(frozen=True, slots=True)
class Packer:
    """Copies weights to the device."""

    device: torch.device

    def pack_dense(self, weight: torch.Tensor, *, exact: bool = False) -> PackedDense:
        """See the contract."""
        check_dense(weight)
        dtype = torch.float32 if exact else torch.bfloat16
        return CudaDense(weight.to(self.device, dtype, copy=True).contiguous())

    def pack_fp8(self, codes: torch.Tensor, scales: torch.Tensor, block: int) -> PackedDense:
        """See the contract."""
        return CudaFp8(codes.to(self.device), scales.to(self.device), block)


@dataclass(frozen=True, slots=True)
class DenseOps:
    """The op on one device."""

    machine: Machine

    def dense_linear(
        self,
        x: torch.Tensor,
        w: PackedDense,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        check_linear(x, w, bias, residual, out, dtypes=ACTIVATIONS)
        assert isinstance(w, (CudaDense, CudaFp8))
        weight = w.weight if isinstance(w, CudaDense) else w.dense().to(torch.bfloat16)
        if weight.dtype == torch.float32:
            if self._kernel_takes(x, residual, out):
                return self._few_rows(x, weight, bias, residual, out)
            if bias is None and residual is None and out is not None and out.dtype == torch.float32:
                return torch.mm(x.float(), weight.t(), out=out)  # a router's logits: no copy
            y = torch.nn.functional.linear(x.float(), weight)
        else:
            narrow = x.to(torch.bfloat16)
            if bias is None and residual is None and out is not None and out.dtype == torch.float32:
                return wide_product(narrow, weight, out)  # a head's logits: no copy
            y = wide_product(narrow, weight)
        return finish_linear(y, bias, residual, out)

    def _kernel_takes(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> bool:
        aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.shape[1] % 4 == 0 and x.data_ptr() % 16 == 0
        dense = all(t is None or t.is_contiguous() for t in (residual, out))
        return (
            0 < x.shape[0] <= _MAX_ROWS and aligned and dense and (residual is None or residual.dtype == torch.float32)
        )

    def _few_rows(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, (n, k) = x.shape[0], weight.shape
        y = torch.empty(rows, n, dtype=torch.float32, device=x.device) if out is None else out
        tokens = min(4, 1 << (rows - 1).bit_length())
        x_bf16, out_bf16 = int(x.dtype == torch.bfloat16), int(y.dtype == torch.bfloat16)
        wanted = spec(_SOURCE, _SOURCE, _SIGNATURE, TOKENS=tokens, THREADS=_THREADS, X_BF16=x_bf16, OUT_BF16=out_bf16)
        grid = (n, -(-rows // tokens), 1)
        arguments = (x, x.stride(0), weight, bias, residual, y, rows, n, k)
        self.machine.programs.kernel(wanted)(grid, _THREADS, arguments, overlap=True)
        return y
