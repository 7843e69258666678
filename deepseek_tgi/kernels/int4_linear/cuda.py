"""INT4 linear on a GPU: which kernel multiplies, and what it must be given.

Activations are rounded to bfloat16 before the product, sums are float32. Up to `stream.MAX_ROWS` rows weights enter the
products exactly; beyond, the product is of weights rounded to bfloat16, as a dequantised model has them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import (
    ACTIVATIONS,
    ComputeDtype,
    PackedInt4,
    check_int4,
    check_linear,
    describe,
    finish_linear,
    refuse,
)
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.machine import Machine, machine_of
from deepseek_tgi.kernels.int4_linear import dequantised, layout, stream
from deepseek_tgi.kernels.int4_linear.cpu import NibbleInt4
from deepseek_tgi.kernels.int4_linear.layout import CudaInt4

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`."""
    if kernels.compute_dtype is ComputeDtype.FLOAT32:
        raise BuildError("INT4 products on a GPU are of bfloat16 activations, and float32 compute was asked for")
    ops = Int4Ops(machine_of(kernels.device))
    return replace(kernels, pack_int4=Packer(kernels.device), int4_linear=ops.int4_linear)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for the kernels; a weight they do not take keeps its nibbles, is multiplied by torch, and is named."""

    device: torch.device

    def __call__(self, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedInt4:
        """See the contract. The arguments may lie on the host."""
        tensors = check_int4(codes.to(self.device), zeros.to(self.device), scales.to(self.device), group_size)
        reason = layout.refusal(tensors)
        if reason is None:
            return layout.pack(tensors.codes, tensors.zeros, tensors.scales, group_size)
        logger.warning("INT4 weight %s: %s; multiplied by torch operators", list(codes.shape), reason)
        return NibbleInt4(tensors, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Int4Ops:
    """The op on one device."""

    machine: Machine

    def int4_linear(
        self,
        x: torch.Tensor,
        w: PackedInt4,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        check_operands(x, w, bias, residual, out)
        rows = x.shape[0]
        y = torch.empty(rows, w.out_features, dtype=torch.float32, device=x.device) if out is None else out
        if rows == 0:
            return y
        narrow = residual is None or residual.dtype == torch.float32
        if isinstance(w, CudaInt4) and rows <= stream.MAX_ROWS and narrow and stream_takes(x):
            shape = self.shape_for(w, rows)
            if shape is not None:
                stream.launch(self.machine, shape, x, w, y, bias=bias, residual=residual)
                return y
        return finish(self._product(x, w, y.dtype == torch.float32), bias, residual, y)

    def _product(self, x: torch.Tensor, w: PackedInt4, wide: bool) -> torch.Tensor:
        if isinstance(w, CudaInt4):
            return dequantised.multiply(self.machine.programs, x.to(torch.bfloat16), w, wide)
        assert isinstance(w, NibbleInt4)
        weight = w.dequantise().to(torch.bfloat16)
        return dequantised.wide_product(x.to(torch.bfloat16), weight)

    def shape_for(self, w: CudaInt4, rows: int) -> stream.StreamShape | None:
        """How to cut `w` for `rows` rows; None where nothing fits."""
        for shape in stream.default_shapes(w, rows, self.machine.multiprocessors):
            if stream.fits(shape, rows, w, self.machine.capability):
                return shape
        return None


def stream_takes(x: torch.Tensor) -> bool:
    """Whether the kernels can read `x` in vectors: dense rows, aligned to 16 bytes."""
    size = x.element_size()
    return x.stride(1) == 1 and x.stride(0) * size % 16 == 0 and x.data_ptr() % 16 == 0


def finish(
    y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Add what is to be added to a product, in float32, into `out`."""
    if bias is None and residual is None:
        out.copy_(y)
        return out
    return finish_linear(y.float(), bias, residual, out)


def check_operands(
    x: torch.Tensor,
    w: PackedInt4,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check what a kernel would read or write beyond. Raises `GenerationError`."""
    check_linear(x, w, bias, residual, out, dtypes=ACTIVATIONS)
    for name, tensor in (("bias", bias), ("residual", residual), ("out", out)):
        if tensor is not None and not tensor.is_contiguous():
            refuse(f"int4_linear: {describe(name, tensor)} is to be contiguous")
