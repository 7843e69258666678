"""INT4 linear on a GPU: which kernel multiplies, and what it must be given.

Activations are rounded to bfloat16 before the product, sums are float32. In the kernel for few rows, and in panels of
up to 64 rows that the copy engine brings, if groups are of 64 or more, weights enter exactly; else they are rounded to
bfloat16 once, as a dequantised model has them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
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
from deepseek_tgi.kernels.int4_linear import dequantised, layout, panel, stream, wide
from deepseek_tgi.kernels.int4_linear.choice import Chooser, tables_for
from deepseek_tgi.kernels.int4_linear.cpu import NibbleInt4
from deepseek_tgi.kernels.int4_linear.layout import CudaInt4
from deepseek_tgi.kernels.int4_linear.stream import StreamShape
from deepseek_tgi.kernels.int4_linear.wide import WideShape
from deepseek_tgi.kernels.wide_product import wide_product

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`."""
    if kernels.compute_dtype is ComputeDtype.FLOAT32:
        raise BuildError("INT4 products on a GPU are of bfloat16 activations, and float32 compute was asked for")
    machine = machine_of(kernels.device)
    ops = Int4Ops(machine, Chooser(tables_for(kernels.device), machine.multiprocessors, machine.capability))
    return replace(kernels, pack_int4=Packer(kernels.device), int4_linear=ops.int4_linear)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for the kernels; a weight they do not take keeps its nibbles, is multiplied by torch, and is named once."""

    device: torch.device
    _said: set[str] = field(default_factory=set)

    def __call__(self, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedInt4:
        """See the contract. The arguments may lie on the host."""
        tensors = check_int4(codes.to(self.device), zeros.to(self.device), scales.to(self.device), group_size)
        reason = layout.refusal(tensors)
        if reason is None:
            return layout.pack(tensors.codes, tensors.zeros, tensors.scales, group_size)
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("INT4 weight %s: %s; such are multiplied by torch's operators", list(codes.shape), reason)
        return NibbleInt4(tensors, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Int4Ops:
    """The op on one device."""

    machine: Machine
    chooser: Chooser

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
        if isinstance(w, CudaInt4) and (residual is None or residual.dtype == torch.float32):
            choice = self.chooser.choice(w, rows)
            if isinstance(choice, StreamShape):
                stream.launch(self.machine, choice, in_vectors(x), w, y, bias=bias, residual=residual)
                return y
            narrow = x.to(torch.bfloat16)
            if choice is None:
                dequantised.write(self.machine.programs, narrow, w, y, bias=bias, residual=residual)
            elif isinstance(choice, WideShape):
                wide.launch(self.machine, choice, in_vectors(narrow), w, y, bias=bias, residual=residual)
            else:
                panel.launch(self.machine, choice, in_vectors(narrow), w, y, bias=bias, residual=residual)
            return y
        return finish_linear(self._wide_product(x, w), bias, residual, y)

    def _wide_product(self, x: torch.Tensor, w: PackedInt4) -> torch.Tensor:
        if isinstance(w, CudaInt4):
            return dequantised.multiply(self.machine.programs, x.to(torch.bfloat16), w)
        assert isinstance(w, NibbleInt4)
        weight = w.dequantise().to(torch.bfloat16)
        return wide_product(x.to(torch.bfloat16), weight)


def in_vectors(x: torch.Tensor) -> torch.Tensor:
    """`x` as the kernels read it: dense rows, aligned to 16 bytes; a copy where they are not."""
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    # A clone: a single row is contiguous wherever it begins.
    return x if x.stride(1) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


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
