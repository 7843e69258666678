"""How 4-bit weights are laid out in public checkpoints, as data. No torch here.

A dialect is an `AwqFormat`: which axis is packed, in which nibble order, whether the input side comes first, which
names the tensors carry. `unpack` follows the descriptor, so a new dialect is a new value here. A dialect is never
guessed from shapes: square layers look alike in all of them.

Every dialect means `weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]` with codes and zeros in 0..15, g the group
of input k: `k // group_size`, or what a tensor of indices says (activation order). "Symmetric" is a zero of 8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

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
    `group_index` names the tensor with the group of each input (empty: there is none). `zeros_less_one`: zeros are
    stored one less than they are. `stores_midpoint`: zeros are stored for symmetric layers as well. `short_last_group`:
    the input side need not be whole groups.
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
    group_index: str = ""
    zeros_less_one: bool = False
    stores_midpoint: bool = False
    short_last_group: bool = False

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
        groups = -(-in_features // group_size) if self.short_last_group else in_features // group_size
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
    group_index="weight_g_idx",
)
GPTQ = AwqFormat(
    name="gptq",
    weight="qweight",
    zeros="qzeros",
    scales="scales",
    nibble_order=(0, 1, 2, 3, 4, 5, 6, 7),
    weight_axis=Axis.IN,
    zeros_axis=Axis.OUT,
    input_major=True,
    group_index="g_idx",
    zeros_less_one=True,
    stores_midpoint=True,
    short_last_group=True,
)
GPTQ_V2 = replace(GPTQ, name="gptq_v2", zeros_less_one=False)
AWQ_VERSIONS = {"gemm": GEMM, "gemv": GEMV}
"""`quantization_config.version` of AutoAWQ checkpoints that can be read."""
GPTQ_FORMATS = {"gptq": GPTQ, "gptq_v2": GPTQ_V2}
"""`quantization_config.checkpoint_format` of GPTQ checkpoints that can be read."""
