"""Dense linear on the C++ library: activations stay float32, weights stay as the checkpoint has them where it matters.

Choice: bfloat16 and float16 weights keep their own 16 bits; float32 weights become bfloat16 under bfloat16 compute. A
large weight (an output head) that already lies on an int8 grid of 32 is stored so: heads from Q8_0 files do, and
reading half the bytes takes half the time. The test is of every weight, within one bfloat16 step, and applies under
bfloat16 compute only. Rejected: int8 for any head; on weights that do not lie on such a grid it costs 0.4% each.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.common import (
    ComputeDtype,
    PackedDense,
    check_dense,
    check_fp8,
    check_linear,
    describe,
    refuse,
)
from deepseek_tgi.kernels.library import DenseWeight, NativeLibrary, QuantWeight
from deepseek_tgi.kernels.quant_layout import GRID, GRID_MIN_WEIGHTS, TILE, block_width, in_tiles, padded_tiles

_F32 = torch.float32
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOAT8 = 3
_GRID_FITS = 3
_WEIGHTS_AT_ONCE = 1 << 16
_BF16_STEP = 2.0**-8


class NativeDense(PackedDense):
    """A weight in the library's tiles, in 32, 16 or 8 bits (these with scales)."""

    __slots__ = ("_library", "_parts", "address", "struct")

    def __init__(self, library: NativeLibrary, parts: tuple[torch.Tensor, ...], struct: DenseWeight) -> None:
        self._library, self._parts, self.struct = library, parts, struct
        self.address = ctypes.addressof(struct)
        super().__init__(struct.n, struct.k, sum(p.nbytes for p in parts))

    def dense(self) -> torch.Tensor:
        """The weight as stored, `[N, K] float32`."""
        return self.rows(torch.arange(self.out_features))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` as float32; ids are in range."""
        out = torch.empty(ids.shape[0], self.in_features)
        call = self._library.pass_handle(out.numel())
        call.dstgi_dense_rows(self.address, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out


class NativeGrid(PackedDense):
    """A weight on an int8 grid: one float16 scale for 32 weights along K."""

    __slots__ = ("_library", "_parts", "address", "struct")

    def __init__(self, library: NativeLibrary, parts: tuple[torch.Tensor, ...], struct: QuantWeight) -> None:
        self._library, self._parts, self.struct = library, parts, struct
        self.address = ctypes.addressof(struct)
        super().__init__(struct.n, struct.k, sum(p.nbytes for p in parts))

    def dense(self) -> torch.Tensor:
        """The weight as stored, `[N, K] float32`."""
        return self.rows(torch.arange(self.out_features))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` as float32; ids are in range."""
        out = torch.empty(ids.shape[0], self.in_features)
        call = self._library.pass_handle(out.numel())
        call.dstgi_quant_rows(self.address, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out


def on_grid(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`(codes [N, K] int8, scales [N, K / 32] float16)` if every weight lies within a bfloat16 step of `code * scale`.

    The largest weight of 32 is taken for code 127, as Q8_0 has it. Weights that were rounded to 16 bits since then put
    that first scale off by as much, so codes and scale are fitted to each other in turn. Goes by a few rows at a time:
    the first that do not fit end the search, and temporaries stay small beside the weight.
    """
    out_features, in_features = weight.shape
    codes = torch.empty(out_features, in_features, dtype=torch.int8)
    scales = torch.empty(out_features, in_features // GRID, dtype=torch.float16)
    step = max(1, _WEIGHTS_AT_ONCE // in_features)
    for row in range(0, out_features, step):
        if not _fit_rows(weight[row : row + step], codes[row : row + step], scales[row : row + step]):
            return None
    return codes, scales


def _fit_rows(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> bool:
    """Fill `codes` and `scales`; false if a weight is further than a bfloat16 step from its code."""
    groups = weight.float().view(weight.shape[0], -1, GRID)
    step = groups.abs().amax(-1, keepdim=True) / 127.0
    for _ in range(_GRID_FITS):
        fitted = (groups / torch.where(step > 0, step, 1.0)).round_().clamp_(-127, 127)
        squares = (fitted * fitted).sum(-1, keepdim=True)
        step = (groups * fitted).sum(-1, keepdim=True) / torch.where(squares > 0, squares, 1.0)
    half = step.half()
    off = (fitted * half.float()).sub_(groups).abs_()
    codes.copy_(fitted.view(weight.shape))
    scales.copy_(half.squeeze(-1))
    return bool((off <= groups.abs() * _BF16_STEP).all())


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for one library, precision and thread count."""

    library: NativeLibrary
    compute_dtype: ComputeDtype
    num_threads: int

    def __call__(self, weight: torch.Tensor, *, exact: bool = False) -> PackedDense:
        """See the contract."""
        check_dense(weight)
        bf16 = self.compute_dtype is ComputeDtype.BFLOAT16 and not exact
        if bf16 and weight.numel() >= GRID_MIN_WEIGHTS and weight.shape[1] % GRID == 0:
            grid = on_grid(weight)
            if grid is not None:
                return self._pack_grid(*grid)
        if weight.dtype not in _KINDS or (bf16 and weight.dtype == torch.float32):
            weight = weight.to(torch.bfloat16 if bf16 else torch.float32)
        return self._pack_float(weight)

    def _pack_float(self, weight: torch.Tensor) -> PackedDense:
        data = _tiled(weight, 2 if weight.dtype == torch.bfloat16 else 1)
        n, k = weight.shape
        struct = DenseWeight(n, k, _KINDS[weight.dtype], self.num_threads, 0, data.data_ptr(), None)
        return NativeDense(self.library, (data,), struct)

    def _pack_grid(self, codes: torch.Tensor, scales: torch.Tensor) -> PackedDense:
        out_features, in_features = codes.shape
        per_group, width = block_width(GRID)
        blocks = in_features // GRID * per_group
        packed = torch.empty(padded_tiles(out_features) * blocks * (width // 4) * 32, dtype=torch.int32)
        parts = (packed, in_tiles(scales, per_group))
        struct = QuantWeight(
            out_features, in_features, GRID, per_group, blocks, width, 8, 1, 1, self.num_threads,
            packed.data_ptr(), parts[1].data_ptr(), None,
        )  # fmt: skip
        self.library.slow.dstgi_pack_codes(ctypes.addressof(struct), codes.data_ptr())
        return NativeGrid(self.library, parts, struct)


def _tiled(weight: torch.Tensor, pair: int) -> torch.Tensor:
    """`[N, K]` as `[tiles, ceil(K / pair), 32, pair]`, padded with zeros, some tiles at a time."""
    out_features, in_features = weight.shape
    tiles = padded_tiles(out_features)
    data = torch.zeros(tiles, -(-in_features // pair), TILE, pair, dtype=weight.dtype)
    step = max(1, _WEIGHTS_AT_ONCE // (in_features * TILE))
    for tile in range(0, tiles, step):
        rows = weight[tile * TILE : (tile + step) * TILE]
        count = min(step, tiles - tile)
        padded = torch.nn.functional.pad(rows, (0, in_features % pair, 0, count * TILE - rows.shape[0]))
        # [count, 32, K / pair, pair] -> [count, K / pair, 32, pair]
        data[tile : tile + count] = padded.view(count, TILE, -1, pair).transpose(1, 2)
    return data


@dataclass(frozen=True, slots=True)
class Fp8Packer:
    """Packs FP8 weights for one library and thread count."""

    library: NativeLibrary
    num_threads: int

    def __call__(self, codes: torch.Tensor, scales: torch.Tensor, block: int) -> PackedDense:
        """See the contract."""
        check_fp8(codes, scales, block)
        parts = (_tiled(codes.view(torch.uint8), 1), in_tiles(scales, 1))
        struct = DenseWeight(*codes.shape, _FLOAT8, self.num_threads, block, *(part.data_ptr() for part in parts))
        return NativeDense(self.library, parts, struct)


@dataclass(frozen=True, slots=True)
class DenseOps:
    """The op over one library."""

    library: NativeLibrary

    def dense_linear(
        self,
        x: torch.Tensor,
        w: PackedDense,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the contract; all operands are contiguous."""
        check_linear(x, w, bias, residual, out)
        for name, tensor in (("x", x), ("residual", residual), ("out", out)):
            if tensor is not None and not tensor.is_contiguous():
                refuse(f"dense_linear: {describe(name, tensor)} is not contiguous")
        rows = x.shape[0]
        y = torch.empty(rows, w.out_features) if out is None else out
        call = self.library.handle(rows * w.out_features * w.in_features)
        bias_at = None if bias is None else bias.data_ptr()
        residual_at = None if residual is None else residual.data_ptr()
        if isinstance(w, NativeGrid):
            call.dstgi_quant_linear(
                w.address, x.data_ptr(), w.in_features, rows, y.data_ptr(), bias_at, residual_at, 0, None, 0.0
            )
        else:
            assert isinstance(w, NativeDense)
            call.dstgi_dense_linear(w.address, x.data_ptr(), w.in_features, rows, y.data_ptr(), bias_at, residual_at)
        return y
