"""Bytes that weights take once packed, by kernel set: arithmetic for plans made before anything is loaded.

Every number is what the set's own packing function reports for a weight of that shape; tests hold the two together. No
torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.compiler import BuildError, find_compiler
from deepseek_tgi.kernels.precision import ComputeDtype
from deepseek_tgi.kernels.quant_layout import GRID, GRID_MIN_WEIGHTS, TILE, block_width, padded_tiles

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of one item of each dtype a checkpoint may hold, by torch's name for it."""
_OPERATOR_GROUPS = frozenset({32, 64, 128, 256})
_ON_GPU = frozenset({"cuda", "triton"})
_GPU_GROUPS, _GPU_CHUNK, _GPU_ROWS = (128, 64, 32), 64, 64
"""Of `int4_linear.layout`."""


def expected_kernels(wish: str, on_gpu: bool = False) -> str:
    """The kernel set that `select_kernels` would settle on here, or on a GPU, without building anything.

    Raises: `ConfigError` if `native` is asked for and cannot be had.
    """
    if on_gpu:
        return "cuda" if wish == "auto" else wish
    if wish not in ("auto", "native"):
        return wish
    try:
        find_compiler()
    except BuildError as error:
        if wish == "native":
            raise ConfigError(f"kernels: native was asked for, but {error}; auto falls back to torch") from error
        return "torch"
    return "native"


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Sizes under one kernel set (`native`, `cuda`, `triton`, `torch` or `reference`) and precision."""

    kernels: str
    compute: ComputeDtype

    @property
    def _narrow(self) -> bool:
        return self.compute is ComputeDtype.BFLOAT16

    def int4(self, out_features: int, in_features: int, group_size: int, scale_bytes: int = 2) -> int:
        """A 4-bit weight `[N, K]` with a zero and a scale of `scale_bytes` for each group of inputs."""
        groups = in_features // group_size
        if self.kernels == "native":
            per_group, width = block_width(group_size)
            rows, blocks = padded_tiles(out_features) * TILE, groups * per_group
            return rows * blocks * (width // 2 + scale_bytes + 1)
        gpu_group = next((size for size in _GPU_GROUPS if group_size % size == 0), 0)
        if self.kernels == "cuda" and self._narrow and gpu_group:
            chunk = max(gpu_group, _GPU_CHUNK)
            rows, columns = -(-out_features // _GPU_ROWS) * _GPU_ROWS, -(-in_features // chunk) * chunk
            return rows * (columns // 2 + columns // gpu_group * 4 * (1 if scale_bytes == 2 else 2))
        if self.kernels == "torch":
            if self._narrow and group_size in _OPERATOR_GROUPS and out_features % 16 == 0:
                return out_features * (in_features // 2 + groups * 4)
            return out_features * (-(-in_features // 2) + groups * (1 + scale_bytes))
        if self.kernels in _ON_GPU:
            return out_features * (-(-in_features // 2) + groups * (1 + scale_bytes))
        return out_features * (in_features + groups * (1 + scale_bytes))

    def dense(self, out_features: int, in_features: int, dtype: str, on_grid: bool = False) -> int:
        """A dense weight `[N, K]` stored as `dtype`; `on_grid`: its values lie on an int8 grid of 32.

        The native set keeps a large one that does so in 8 bits under bfloat16 (see `dense_linear.native`).
        """
        item = self._dense_item(dtype)
        if self.kernels != "native":
            return out_features * in_features * item
        rows = padded_tiles(out_features) * TILE
        large = out_features * in_features >= GRID_MIN_WEIGHTS and in_features % GRID == 0
        if on_grid and self._narrow and large:
            return rows * (in_features + in_features // GRID * 2)
        pair = 2 if item == 2 and dtype != "float16" else 1
        return rows * -(-in_features // pair) * pair * item

    def exact(self, out_features: int, in_features: int, dtype: str) -> int:
        """A dense weight that loses nothing whatever the precision: the gate of a mixture of experts."""
        return HeldBytes(self.kernels, ComputeDtype.FLOAT32).dense(out_features, in_features, dtype)

    def fp8(self, out_features: int, in_features: int, block: int) -> int:
        """An 8-bit float weight `[N, K]` with a float32 scale for each row and `block` inputs, the last maybe short."""
        rows = padded_tiles(out_features) * TILE if self.kernels == "native" else out_features
        return rows * (in_features + -(-in_features // block) * 4)

    def up_projection(self, out_features: int, in_features: int) -> int:
        """The up-projection of latent attention, `[H * (Dn + Dv), R]`; value heads of whole vector lanes."""
        return out_features * in_features * (2 if self.kernels == "native" and self._narrow else 4)

    def _dense_item(self, dtype: str) -> int:
        """Bytes of an item as kept."""
        if self.kernels == "native":
            keeps = dtype in ("float16", "bfloat16")
            return 2 if keeps or self._narrow else 4
        if self.kernels == "torch" or self.kernels in _ON_GPU:
            return 2 if self._narrow else 4
        return ITEM_BYTES[dtype]
