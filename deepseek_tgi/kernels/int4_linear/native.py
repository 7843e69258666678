"""INT4 linear on the C++ library: weights stay INT4 in memory, arithmetic as `native/qlinear.cpp` explains.

A decode step makes hundreds of these calls of a few microseconds, so addresses are taken once, at packing, and a call
checks only what could make the library read beyond an operand; the messages come from the contract's checks.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.common import (
    ComputeDtype,
    PackedInt4,
    check_addends,
    check_int4,
    check_linear,
    describe,
    refuse,
)
from deepseek_tgi.kernels.library import QUICK_PRODUCTS, NativeLibrary, QuantWeight
from deepseek_tgi.kernels.quant_layout import block_width, exact_scales, in_tiles, padded_tiles

_F32 = torch.float32
_PLAIN, _NORM, _SILU = 0, 1, 2


class NativeInt4(PackedInt4):
    """Codes, scales and zeros in the library's tiles; `address` is the C struct's."""

    __slots__ = ("_codes", "_scales", "_zeros", "address", "quick_rows", "struct")

    def __init__(self, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], struct: QuantWeight) -> None:
        self._codes, self._scales, self._zeros = parts
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self.quick_rows = QUICK_PRODUCTS // (struct.n * struct.k)
        super().__init__(struct.n, struct.k, struct.group_size, sum(p.nbytes for p in parts))

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`, read back from the packed form."""
        s = self.struct
        words = self._codes.view(-1, s.blocks, s.width // 8, 32)
        shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
        codes = (words.unsqueeze(-1) >> shifts) & 15  # [tiles, blocks, width / 8, 32, 8]
        codes = codes.permute(0, 3, 1, 2, 4).reshape(-1, s.blocks, s.width)
        scales = self._scales.float().transpose(1, 2).reshape(-1, s.blocks, 1)
        zeros = self._zeros.float().transpose(1, 2).reshape(-1, s.blocks, 1)
        groups = ((codes.float() - zeros) * scales).view(-1, s.k // s.group_size, s.blocks_per_group * s.width)
        return groups[: s.n, :, : s.group_size].reshape(s.n, s.k)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for one library, precision and thread count."""

    library: NativeLibrary
    compute_dtype: ComputeDtype
    num_threads: int

    def __call__(self, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedInt4:
        """See the contract. Scales are kept in 16 bits if that is exact, else in 32."""
        tensors = check_int4(codes, zeros, scales, group_size)
        out_features, in_features = codes.shape
        per_group, width = block_width(group_size)
        blocks = in_features // group_size * per_group
        packed = torch.empty(padded_tiles(out_features) * blocks * (width // 8) * 32, dtype=torch.int32)
        kind, exact = exact_scales(tensors.scales)
        parts = (packed, in_tiles(exact, per_group), in_tiles(tensors.zeros, per_group))
        digits = 1 if self.compute_dtype is ComputeDtype.BFLOAT16 else 2
        struct = QuantWeight(
            out_features, in_features, group_size, per_group, blocks, width, 4, kind, digits, self.num_threads,
            *(part.data_ptr() for part in parts),
        )  # fmt: skip
        source = tensors.codes.contiguous()
        self.library.slow.dstgi_pack_codes(ctypes.addressof(struct), source.data_ptr())
        return NativeInt4(parts, struct)


def _fits(tensor: torch.Tensor, size: int) -> bool:
    return tensor.numel() == size and tensor.dtype is _F32 and tensor.is_contiguous()


def _rows_fit(x: torch.Tensor, w: NativeInt4) -> bool:
    return x.dim() == 2 and x.shape[1] == w.in_features and x.dtype is _F32 and x.stride(1) == 1


@dataclass(frozen=True, slots=True)
class Int4Ops:
    """The three forms of the op over one library."""

    library: NativeLibrary

    def _run(
        self,
        x: torch.Tensor,
        w: NativeInt4,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
        *,
        prologue: tuple[int, int | None, float] = (_PLAIN, None, 0.0),
    ) -> torch.Tensor:
        rows, size = x.shape[0], x.shape[0] * w.out_features
        if (
            (out is not None and not _fits(out, size))
            or (bias is not None and not _fits(bias, w.out_features))
            or (residual is not None and not _fits(residual, size))
        ):
            check_addends((rows, w.out_features), bias, residual, out)
            refuse("int4_linear: bias, residual and out are to be contiguous")
        if out is None:
            out = torch.empty(rows, w.out_features)
        call = self.library.quick if rows <= w.quick_rows else self.library.slow
        kind, norm, eps = prologue
        call.dstgi_quant_linear(
            w.address, x.data_ptr(), x.stride(0), rows, out.data_ptr(), None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), kind, norm, eps,
        )  # fmt: skip
        return out

    def int4_linear(
        self,
        x: torch.Tensor,
        w: PackedInt4,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        assert isinstance(w, NativeInt4)
        if not _rows_fit(x, w):
            check_linear(x, w, bias, residual, out)
            refuse(f"int4_linear: {describe('x', x)} is to have dense rows")
        return self._run(x, w, bias, residual, out)

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
        assert isinstance(w, NativeInt4)
        if not _rows_fit(x, w):
            check_linear(x, w, bias, None, out)
            refuse(f"int4_linear: {describe('x', x)} is to have dense rows")
        if not _fits(norm_weight, w.in_features):
            refuse(f"norm_int4_linear: got {describe('weight', norm_weight)}, expected [{w.in_features}] float32")
        return self._run(x, w, bias, None, out, prologue=(_NORM, norm_weight.data_ptr(), eps))

    def silu_int4_linear(
        self,
        gate_up: torch.Tensor,
        w: PackedInt4,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the contract; `gate_up` is contiguous."""
        assert isinstance(w, NativeInt4)
        if gate_up.dim() != 2 or gate_up.shape[1] != 2 * w.in_features or not _fits(gate_up, gate_up.numel()):
            refuse(
                f"silu_int4_linear: got {describe('gate_up', gate_up)}, "
                f"expected [M, {2 * w.in_features}] float32, contiguous"
            )
        return self._run(gate_up, w, bias, residual, out, prologue=(_SILU, None, 0.0))
