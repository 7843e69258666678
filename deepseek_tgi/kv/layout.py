"""How one token's keys and values lie in memory: arithmetic on data, no tensors.

The byte counts here are the only ones: warm-up, allocation, metrics, `info` and the README all ask this module.

Choice: one page holds one block of `block_size` tokens for *all* layers, and pages are rounded up to 4096 bytes once.
Prevents: per-layer pages of small models losing a quarter of the memory to rounding, and copies of a block (prefix
hand-over, offload) touching one region per layer. Rejected: one tensor per layer, as TGI does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deepseek_tgi.errors import ConfigError

PAGE_ALIGNMENT_BYTES = 4096
MIN_BLOCK_SIZE = 16
"""Kernels work through a page in runs of 16 positions; TGI's own paged layout has blocks of 16 as well."""


class KVMode(Enum):
    """Number format of cached keys and values; the value is the command-line name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"

    @property
    def item_bytes(self) -> int:
        """Bytes of one cached element, without scales."""
        return {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[self.value]

    @property
    def quantised(self) -> bool:
        """True if elements need a scale and a zero to be read."""
        return self is KVMode.INT8


@dataclass(frozen=True, slots=True)
class Section:
    """A run of equal elements inside a layer's part of a page.

    `shape` is `[G, S, width]`; `offset_bytes` counts from the start of the page.
    """

    name: str
    offset_bytes: int
    shape: tuple[int, int, int]
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes the section takes in one page."""
        a, b, c = self.shape
        return a * b * c * self.item_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Per-head paged cache of one rank: G KV heads of `k_dim`/`v_dim`, in blocks of `block_size` slots.

    INT8 stores `q = round((x - zero) / scale)` as uint8 with `scale` and `zero` in float16 per token and KV head.
    Raises `ConfigError` for a block size below 16 or not a multiple of 16.
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    mode: KVMode
    block_size: int = MIN_BLOCK_SIZE

    def __post_init__(self) -> None:
        if self.block_size < MIN_BLOCK_SIZE or self.block_size % MIN_BLOCK_SIZE:
            raise ConfigError(
                f"block_size: got {self.block_size}, expected a multiple of {MIN_BLOCK_SIZE} "
                "(kernels work through a block in runs of as many tokens)"
            )

    def sections(self, layer: int) -> tuple[Section, ...]:
        """The parts of one page that belong to `layer`: `k`, `v`, then `k_scale`, `v_scale` if quantised.

        A scale section is `[G, S, 2]` float16: scale, then zero.
        """
        g, s = self.num_kv_heads, self.block_size
        offset = layer * self.layer_bytes_per_block
        parts: list[Section] = []
        specs = [("k", self.k_dim, self.mode.item_bytes), ("v", self.v_dim, self.mode.item_bytes)]
        if self.mode.quantised:
            specs += [("k_scale", 2, 2), ("v_scale", 2, 2)]
        for name, width, item in specs:
            part = Section(name, offset, (g, s, width), item)
            parts.append(part)
            offset += part.size_bytes
        return tuple(parts)

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes one token takes in one layer, scales included."""
        scales = 2 * 2 * 2 if self.mode.quantised else 0
        return self.num_kv_heads * ((self.k_dim + self.v_dim) * self.mode.item_bytes + scales)

    @property
    def layer_bytes_per_block(self) -> int:
        """Bytes one block takes in one layer."""
        return self.layer_bytes_per_token * self.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers, page rounding left out."""
        return self.layer_bytes_per_token * self.num_layers

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one page: all layers, rounded up to `PAGE_ALIGNMENT_BYTES`."""
        raw = self.layer_bytes_per_block * self.num_layers
        return -(-raw // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES

    def num_blocks_in(self, budget_bytes: int) -> int:
        """Whole blocks that fit in `budget_bytes`; never negative."""
        return max(0, budget_bytes) // self.bytes_per_block
