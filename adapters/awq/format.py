"""How 4-bit weights are laid out in public checkpoints, as data, and the one form they take in memory.

A dialect is an `AwqFormat`: which axis is packed, in which nibble order, whether the input side comes first, which
names the tensors carry. `unpack` follows the descriptor, so a new dialect is a new value here. A dialect is never
guessed from shapes: square layers look alike in all of them.

Every dialect means `weight[n, k] = (code[n, k] - zero[n, k // group_size]) * scale[n, k // group_size]` with codes and
zeros in 0..15; "symmetric" is a zero of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NIBBLES_PER_WORD = 8
SYMMETRIC_ZERO = 8
"""The midpoint: what an absent zero tensor means."""


class Axis(Enum):
    """Which side of a weight `[N, K]` eight neighbours are packed along."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """One dialect.

    Nibble `i` of a word, counted from the low end, holds column `nibble_order[i]` of its eight. `input_major` means
    tensors are `[K, N]`-like, else `[N, K]`-like. `zeros_axis` is the packed axis of the zero tensor. `pads_groups`:
    the group axis of zeros and scales is padded with zeros to a multiple of what the kernels of that dialect read.
    """

    name: str
    weight: str
    zeros: str
    scales: str
    nibble_order: tuple[int, ...]
    weight_axis: Axis
    zeros_axis: Axis
    input_major: bool
    pads_groups: bool = False

    def weight_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape of the packed weight tensor."""
        return self._stored_shape(out_features, in_features, self.weight_axis)

    def zeros_shape(self, out_features: int, in_features: int, group_size: int) -> tuple[int, int]:
        """Shape of the packed zero tensor."""
        return self._stored_shape(out_features, self._stored_groups(in_features, group_size), self.zeros_axis)

    def scales_shape(self, out_features: int, in_features: int, group_size: int) -> tuple[int, int]:
        """Shape of the scale tensor (not packed)."""
        return self._stored_shape(out_features, self._stored_groups(in_features, group_size), None)

    def _stored_shape(self, out_side: int, in_side: int, packed: Axis | None) -> tuple[int, int]:
        if packed is Axis.OUT:
            out_side = -(-out_side // NIBBLES_PER_WORD)
        elif packed is Axis.IN:
            in_side = -(-in_side // NIBBLES_PER_WORD)
        return (in_side, out_side) if self.input_major else (out_side, in_side)

    def _stored_groups(self, in_features: int, group_size: int) -> int:
        groups = in_features // group_size
        if not self.pads_groups:
            return groups
        # AutoAWQ `calculate_zeros_width`: whole words, and as many words as cover 128 inputs per kernel step.
        words = -(-groups // NIBBLES_PER_WORD)
        step = max(1, 128 // group_size)
        return -(-words // step) * step * NIBBLES_PER_WORD


GEMM = AwqFormat(
    name="gemm",
    weight="qweight",
    zeros="qzeros",
    scales="scales",
    nibble_order=(0, 2, 4, 6, 1, 3, 5, 7),
    weight_axis=Axis.OUT,
    zeros_axis=Axis.OUT,
    input_major=True,
)
GEMV = AwqFormat(
    name="gemv",
    weight="qweight",
    zeros="qzeros",
    scales="scales",
    nibble_order=(0, 1, 2, 3, 4, 5, 6, 7),
    weight_axis=Axis.IN,
    zeros_axis=Axis.IN,
    input_major=False,
    pads_groups=True,
)
PACK_QUANTIZED = AwqFormat(
    name="pack-quantized",
    weight="weight_packed",
    zeros="weight_zero_point",
    scales="weight_scale",
    nibble_order=(0, 1, 2, 3, 4, 5, 6, 7),
    weight_axis=Axis.IN,
    zeros_axis=Axis.OUT,
    input_major=False,
)
AWQ_VERSIONS = {"gemm": GEMM, "gemv": GEMV}
"""`quantization_config.version` of AutoAWQ checkpoints that can be read."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A 4-bit linear layer, dialect-free.

    Shapes: `codes [N, K] uint8` in 0..15, `zeros [N, K/group_size] uint8` in 0..15, `scales [N, K/group_size]` in the
    stored dtype, `bias [N]` or None. `group_size` is the real one (-1 already resolved to K).
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_size: int
    bias: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.codes.shape[1])

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`, each product exact."""
        groups = self.codes.view(self.out_features, -1, self.group_size).float()
        values = groups.sub_(self.zeros.unsqueeze(-1)).mul_(self.scales.float().unsqueeze(-1))
        return values.view(self.out_features, self.in_features)

    def reordered(self, rows: torch.Tensor) -> Int4Weight:
        """The layer with its outputs in the order `rows [N] int64`."""
        bias = None if self.bias is None else self.bias[rows]
        return Int4Weight(self.codes[rows], self.zeros[rows], self.scales[rows], self.group_size, bias)

    @staticmethod
    def can_cat(parts: Sequence[Int4Weight | DenseWeight]) -> bool:
        """True if `cat` may fuse the parts: all 4-bit, same input side, same group size."""
        first = parts[0]
        return isinstance(first, Int4Weight) and all(
            isinstance(p, Int4Weight) and (p.in_features, p.group_size) == (first.in_features, first.group_size)
            for p in parts
        )

    @staticmethod
    def cat(parts: Sequence[Int4Weight]) -> Int4Weight:
        """Fuse along the output side in the order given, biases with their columns (a missing one counts as 0)."""
        import torch

        assert Int4Weight.can_cat(parts), "only layers of one input side and group size fuse"
        return Int4Weight(
            codes=torch.cat([p.codes for p in parts]),
            zeros=torch.cat([p.zeros for p in parts]),
            scales=torch.cat([p.scales for p in parts]),
            group_size=parts[0].group_size,
            bias=_cat_biases(parts),
        )


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """An unquantised linear layer: `weight [N, K]` and `bias [N]` or None, in the stored dtype.

    The tensors may be views of the mapped file: copy before writing to them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

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
        return self.weight.float()

    def reordered(self, rows: torch.Tensor) -> DenseWeight:
        """The layer with its outputs in the order `rows [N] int64`."""
        return DenseWeight(self.weight[rows], None if self.bias is None else self.bias[rows])

    @staticmethod
    def cat(parts: Sequence[DenseWeight]) -> DenseWeight:
        """Fuse along the output side in the order given, biases with their columns (a missing one counts as 0)."""
        import torch

        return DenseWeight(torch.cat([p.weight for p in parts]), _cat_biases(parts))


def _cat_biases(parts: Sequence[Int4Weight] | Sequence[DenseWeight]) -> torch.Tensor | None:
    import torch

    given = [p.bias for p in parts if p.bias is not None]
    if not given:
        return None
    return torch.cat([given[0].new_zeros(p.out_features) if p.bias is None else p.bias for p in parts])
