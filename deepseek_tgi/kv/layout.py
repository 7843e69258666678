"""How one token's cached state lies in memory: arithmetic on data, no tensors.

The byte counts here are the only ones: warm-up, allocation, metrics, `info` and the README all ask this module.

Choice: one page holds one block of `block_size` tokens for *all* layers, and pages are rounded up to 4096 bytes once.
Prevents: per-layer pages of small models losing a quarter of the memory to rounding, and copies of a block (prefix
hand-over, offload) touching one region per layer. Rejected: one tensor per layer, as TGI does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.precision import int4_group

PAGE_ALIGNMENT_BYTES = 4096
MIN_BLOCK_SIZE = 16
"""Kernels work through a page in runs of 16 positions; TGI's own paged layout has blocks of 16 as well."""
LATENT_GROUPS = (128, 64, 32, 16)
"""Elements of a latent that share one scale: the largest of these that divides the rank; at INT4 at most 32."""
_INT4_GROUP = 32


class KVMode(Enum):
    """Number format of cached state; the value is the command-line name (FP8's is TGI's)."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8_e4m3fn"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Bits of one cached element, without scales."""
        return _BITS[self.value]

    @property
    def quantised(self) -> bool:
        """True if elements need a scale to be read."""
        return self.bits <= 8

    def row_bytes(self, width: int) -> int:
        """Bytes of `width` elements, without scales; INT4 puts two in a byte."""
        return width * self.bits // 8


_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8_e4m3fn": 8, "int8": 8, "int4": 4}
HEAD_UNIT_INT4, LARGEST_HEAD_INT4 = 32, 256
"""Head sizes that INT4 can hold are multiples of the first, up to the second (`kernels.int4_format`)."""


def head_fits_int4(size: int) -> bool:
    """True if INT4 can hold keys or values of `size` elements."""
    return size % HEAD_UNIT_INT4 == 0 and size <= LARGEST_HEAD_INT4


def _head_scales(mode: KVMode, size: int) -> tuple[int, str]:
    """Scales of one key or value of `size` elements, and their dtype."""
    if mode is KVMode.INT4:
        return size // int4_group(size), "uint8"
    return 2 if mode is KVMode.INT8 else 1, "float16"


@dataclass(frozen=True, slots=True)
class Section:
    """A run of equal rows inside a layer's part of a page.

    `shape` is `[G, S, W]` in items as stored (a byte for two INT4 elements); `offset_bytes` counts from the start of
    the page. `dtype` is the name of the items' torch dtype.
    """

    name: str
    offset_bytes: int
    shape: tuple[int, int, int]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes the section takes in one page."""
        a, b, c = self.shape
        return a * b * c * self.item_bytes


class CacheLayout(ABC):
    """A paged cache of one rank in blocks of `block_size` slots; kinds differ in what a layer keeps of a token.

    Raises `ConfigError` for a block size below 16 or not a multiple of 16.
    """

    __slots__ = ()
    num_layers: int
    mode: KVMode
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < MIN_BLOCK_SIZE or self.block_size % MIN_BLOCK_SIZE:
            raise ConfigError(
                f"block_size: got {self.block_size}, expected a multiple of {MIN_BLOCK_SIZE} "
                "(kernels work through a block in runs of as many tokens)"
            )

    @abstractmethod
    def rows(self) -> tuple[tuple[str, int, int, str], ...]:
        """Name, heads, items a row and item dtype of each section of a layer, in order."""

    def sections(self, layer: int) -> tuple[Section, ...]:
        """The parts of one page that belong to `layer`."""
        offset = layer * self.layer_bytes_per_block
        parts: list[Section] = []
        for name, heads, width, dtype in self.rows():
            parts.append(Section(name, offset, (heads, self.block_size, width), dtype))
            offset += parts[-1].size_bytes
        return tuple(parts)

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes one token takes in one layer, scales included."""
        return sum(Section(n, 0, (heads, 1, width), dtype).size_bytes for n, heads, width, dtype in self.rows())

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

    @abstractmethod
    def with_mode(self, mode: KVMode) -> CacheLayout:
        """The same cache in another number format."""

    def num_blocks_in(self, budget_bytes: int) -> int:
        """Whole blocks that fit in `budget_bytes`; never negative."""
        return max(0, budget_bytes) // self.bytes_per_block


@dataclass(frozen=True, slots=True)
class KVLayout(CacheLayout):
    """Per-head keys and values: G KV heads of `k_dim`/`v_dim`.

    Sections `k`, `v`, then `k_scale`, `v_scale` if quantised. Per token and KV head, a vector of D elements takes D + 4
    bytes as INT8 (a float16 scale and zero, `kernels.int8_format`), D + 2 as FP8 (a float16 scale,
    `kernels.fp8_format`) and D/2 + 16 as INT4 (scale bytes, `kernels.int4_format`; fewer for D other than 64, 128 and
    256), which takes head sizes that are multiples of 32.
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    mode: KVMode
    block_size: int = MIN_BLOCK_SIZE

    def __post_init__(self) -> None:
        CacheLayout.__post_init__(self)
        wrong = [size for size in (self.k_dim, self.v_dim) if not head_fits_int4(size)]
        if self.mode is KVMode.INT4 and wrong:
            raise ConfigError(
                f"kv_cache_dtype: got int4 with heads of {wrong[0]} elements, expected a multiple of {HEAD_UNIT_INT4} "
                f"up to {LARGEST_HEAD_INT4}; int8 and fp8_e4m3fn take any head size"
            )

    def with_mode(self, mode: KVMode) -> KVLayout:
        """See `CacheLayout`."""
        return replace(self, mode=mode)

    def rows(self) -> tuple[tuple[str, int, int, str], ...]:
        """See `CacheLayout`."""
        g, mode = self.num_kv_heads, self.mode
        if not mode.quantised:
            return ("k", g, self.k_dim, mode.value), ("v", g, self.v_dim, mode.value)
        return (
            ("k", g, mode.row_bytes(self.k_dim), "uint8"),
            ("v", g, mode.row_bytes(self.v_dim), "uint8"),
            ("k_scale", g, *_head_scales(mode, self.k_dim)),
            ("v_scale", g, *_head_scales(mode, self.v_dim)),
        )


@dataclass(frozen=True, slots=True)
class LatentLayout(CacheLayout):
    """One latent of `rank` elements and one rotary key of `rope_dim` elements a token, shared by all heads (MLA).

    Sections `latent`, `rope`, then `latent_scale` if quantised: one scale for each group of the latent, float16, or a
    byte at INT4 (`kernels.latent_format`). The rotary key is never quantised: it is bfloat16 beside a quantised latent,
    else of the latent's own format.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.3.
    """

    num_layers: int
    rank: int
    rope_dim: int
    mode: KVMode
    block_size: int = MIN_BLOCK_SIZE

    def __post_init__(self) -> None:
        CacheLayout.__post_init__(self)
        if self.rank % LATENT_GROUPS[-1]:
            raise ConfigError(
                f"kv_lora_rank: got {self.rank}, expected a multiple of {LATENT_GROUPS[-1]} "
                "(kernels and scales take a latent in runs of as many elements)"
            )

    def with_mode(self, mode: KVMode) -> LatentLayout:
        """See `CacheLayout`."""
        return replace(self, mode=mode)

    @property
    def group(self) -> int:
        """Elements of the latent that share a scale."""
        largest = _INT4_GROUP if self.mode is KVMode.INT4 else LATENT_GROUPS[0]
        return next(size for size in LATENT_GROUPS if size <= largest and self.rank % size == 0)

    def rows(self) -> tuple[tuple[str, int, int, str], ...]:
        """See `CacheLayout`."""
        if not self.mode.quantised:
            dtype = self.mode.value
            return ("latent", 1, self.rank, dtype), ("rope", 1, self.rope_dim, dtype)
        return (
            ("latent", 1, self.mode.row_bytes(self.rank), "uint8"),
            ("rope", 1, self.rope_dim, "bfloat16"),
            ("latent_scale", 1, self.rank // self.group, "uint8" if self.mode is KVMode.INT4 else "float16"),
        )
