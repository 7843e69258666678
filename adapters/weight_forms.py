"""The forms a linear layer's stored weight takes in memory, whatever dialect it was read from.

`Int4Weight` (4-bit codes in groups), `Fp8Weight` (8-bit floats in blocks) and `DenseWeight` share a set of operations
that are exact for each: `dequantise`, `reordered` (outputs), `rows` and `columns` (a slice of outputs or inputs, as a
rank takes it), `natural` (inputs in file order). `fuse` joins layers that read the same input.

Choice: scales of FP8 blocks are kept one a row and block of inputs, not one a square block. Rows may then be sliced,
reordered and joined anywhere, at a cost of 4 bytes in 128. Rejected: square blocks, which only survive cuts on their
own grid; DeepSeek's query heads are 192 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from deepseek_tgi.adapters.quant_schemes import cut_group

__all__ = ["DenseWeight", "Fp8Weight", "Int4Weight", "Part", "Weight", "fuse", "on_device"]

Outputs = torch.Tensor | slice
"""Which outputs of a layer: `[n] int64`, or a run of them, which stays a view."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A 4-bit linear layer, dialect-free: `w = (code - zero) * scale`.

    Shapes: `codes [N, K] uint8` in 0..15, `zeros [N, K/group_size] uint8` in 0..15, `scales [N, K/group_size]` in the
    stored dtype, `bias [N]` or None. `group_size` is the real one (-1 already resolved to K). `order [K] int64`, if
    given, says that column j of the codes multiplies input `order[j]` (activation order: columns sorted by group).
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_size: int
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def label(self) -> str:
        """Short name for reports."""
        return "int4"

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.codes.shape[1])

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32` with its inputs in file order, each product exact."""
        groups = self.codes.view(self.out_features, -1, self.group_size).to(torch.float32)
        values = groups.sub_(self.zeros.unsqueeze(-1)).mul_(self.scales.to(torch.float32).unsqueeze(-1))
        values = values.view(self.out_features, self.in_features)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def reordered(self, rows: Outputs) -> Int4Weight:
        """The layer with the outputs `rows`, in their order, and their biases."""
        bias = None if self.bias is None else self.bias[rows]
        return replace(self, codes=self.codes[rows], zeros=self.zeros[rows], scales=self.scales[rows], bias=bias)

    def rows(self, start: int, stop: int) -> Int4Weight:
        """Outputs `start:stop` with their biases."""
        return self.reordered(slice(start, stop))

    def columns(self, start: int, stop: int) -> Int4Weight | DenseWeight:
        """Inputs `start:stop`, without the bias (it is added once, after the ranks' sums).

        Within one group the part keeps its one scale. Off the grid of several, groups are cut into equal smaller ones
        that carry the same scale. With an input order the groups fall apart, so the part is dequantised.
        """
        if self.order is not None:
            return DenseWeight(self.dequantise()[:, start:stop])
        size = cut_group(self.group_size, start, stop)
        zeros, scales = (_cut_side(side, self.group_size, size, start, stop) for side in (self.zeros, self.scales))
        return Int4Weight(self.codes[:, start:stop], zeros, scales, size)

    def natural(self) -> Int4Weight | DenseWeight:
        """The layer with its inputs in file order: itself, or dense where groups would fall apart."""
        return self if self.order is None else DenseWeight(self.dequantise(), self.bias)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A linear layer of 8-bit floats: `w = code * scale`, one scale a row and `block` inputs.

    Shapes: `codes [N, K] float8_e4m3fn` without NaN, `scales [N, ceil(K / block)] float32`, `bias [N]` or None. The
    last block may be short. Tensors may be views of the mapped file.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: int
    bias: torch.Tensor | None = None

    @property
    def label(self) -> str:
        """Short name for reports."""
        return "fp8"

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.codes.shape[1])

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`, each product rounded once to float32 (exact for power-of-two scales)."""
        wide = self.scales.repeat_interleave(self.block, 1)[:, : self.in_features]
        return self.codes.to(torch.float32).mul_(wide)

    def reordered(self, rows: Outputs) -> Fp8Weight:
        """The layer with the outputs `rows`, in their order, and their biases."""
        bias = None if self.bias is None else self.bias[rows]
        return Fp8Weight(self.codes[rows], self.scales[rows], self.block, bias)

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Outputs `start:stop` with their biases."""
        return self.reordered(slice(start, stop))

    def columns(self, start: int, stop: int) -> Fp8Weight:
        """Inputs `start:stop`, without the bias. A start off the block grid cuts the blocks into equal smaller ones."""
        size = cut_group(self.block, start, stop, whole=False)
        return Fp8Weight(self.codes[:, start:stop], _cut_side(self.scales, self.block, size, start, stop), size)

    def natural(self) -> Fp8Weight:
        """Itself: its inputs are always in file order."""
        return self


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """An unquantised linear layer: `weight [N, K]` and `bias [N]` or None, in the stored dtype.

    The tensors may be views of the mapped file: copy before writing to them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def label(self) -> str:
        """Short name for reports."""
        return "dense"

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.weight.shape[1])

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`."""
        return self.weight.to(torch.float32)

    def reordered(self, rows: Outputs) -> DenseWeight:
        """The layer with the outputs `rows`, in their order, and their biases."""
        return DenseWeight(self.weight[rows], None if self.bias is None else self.bias[rows])

    def rows(self, start: int, stop: int) -> DenseWeight:
        """Outputs `start:stop` with their biases."""
        return self.reordered(slice(start, stop))

    def columns(self, start: int, stop: int) -> DenseWeight:
        """Inputs `start:stop`, without the bias."""
        return DenseWeight(self.weight[:, start:stop])

    def natural(self) -> DenseWeight:
        """Itself: its inputs are always in file order."""
        return self


Weight = Int4Weight | Fp8Weight | DenseWeight


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a layer."""

    outputs: range
    inputs: range

    def of(self, weight: Weight) -> Weight:
        """That part of the whole layer, without its bias where inputs are cut."""
        if len(self.outputs) < weight.out_features:
            weight = weight.rows(self.outputs.start, self.outputs.stop)
        if len(self.inputs) < weight.in_features:
            weight = weight.columns(self.inputs.start, self.inputs.stop)
        return weight


def fuse(parts: Sequence[Weight]) -> Weight | None:
    """Join layers of one input along their outputs in the order given, biases with their columns; None if they differ
    in form, input order or a group size that cannot be brought together. A missing bias counts as 0.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    int4 = [part for part in parts if isinstance(part, Int4Weight)]
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    dense = [part for part in parts if isinstance(part, DenseWeight)]
    if len(dense) == len(parts):
        return DenseWeight(torch.cat([part.weight for part in dense]), _cat_biases(dense))
    if len(int4) == len(parts):
        return _fuse_int4(int4)
    if len(fp8) == len(parts) and len({(part.in_features, part.block) for part in fp8}) == 1:
        codes, scales = torch.cat([part.codes for part in fp8]), torch.cat([part.scales for part in fp8])
        return Fp8Weight(codes, scales, fp8[0].block, _cat_biases(fp8))
    return None


def on_device(weight: Weight, device: torch.device) -> Weight:
    """`weight` with its tensors on `device`."""
    moved: dict[str, Any] = {
        f.name: value.to(device) for f in fields(weight) if isinstance(value := getattr(weight, f.name), torch.Tensor)
    }
    return replace(weight, **moved)


def _cut_side(side: torch.Tensor, old: int, new: int, start: int, stop: int) -> torch.Tensor:
    """What `side [N, groups of old]` holds for inputs `start:stop` in groups of `new` (see `cut_group`)."""
    return side[:, torch.arange(start, stop, new, device=side.device) // old]


def _fuse_int4(parts: Sequence[Int4Weight]) -> Int4Weight | None:
    first = parts[0]
    alike = all(
        (part.in_features, part.group_size) == (first.in_features, first.group_size)
        and _same_order(part.order, first.order)
        for part in parts
    )
    if not alike:
        return None
    return Int4Weight(
        codes=torch.cat([p.codes for p in parts]),
        zeros=torch.cat([p.zeros for p in parts]),
        scales=torch.cat([p.scales for p in parts]),
        group_size=first.group_size,
        bias=_cat_biases(parts),
        order=first.order,
    )


def _same_order(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _cat_biases(parts: Sequence[Weight]) -> torch.Tensor | None:
    given = [p.bias for p in parts if p.bias is not None]
    if not given:
        return None
    return torch.cat([given[0].new_zeros(p.out_features) if p.bias is None else p.bias for p in parts])
