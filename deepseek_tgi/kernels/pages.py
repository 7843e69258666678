"""How kernels see one layer of the paged cache: typed strided tensors and the addresses behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")
P = TypeVar("P", bound="Kept")


class Kept:
    """Pages that remember what was worked out from them in their field `derived`."""

    __slots__ = ()
    derived: dict[Any, Any]

    def kept(self: P, work_out: Callable[[P], T]) -> T:
        """`work_out(self)`, done once: it looks at how the pages lie, not at what they hold."""
        try:
            found: T = self.derived[work_out]
        except KeyError:
            found = self.derived[work_out] = work_out(self)
        return found


@dataclass(frozen=True, slots=True)
class LayerPages(Kept):
    """One layer's keys and values in every page; a view of memory that `KVPool` owns.

    Shapes: `k [P, G, S, Dk]`, `v [P, G, S, Dv]` of `dtype` (uint8 when quantised; `[P, G, S, D/2]` for INT4),
    `k_scale`/`v_scale [P, G, S, n]` (INT8: scale and zero, float16; FP8: a float16 scale; INT4: scale bytes) or None.
    `mode` is the `KVMode` value. The page axis has the stride of a whole page; the others are dense.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    mode: str
    block_size: int
    native: list[Any] = field(default_factory=list, compare=False, repr=False)
    """What the native kernels derived from this view, once."""
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """The same of `kept`."""

    @property
    def quantised(self) -> bool:
        """True if values need scales to be read."""
        return self.k_scale is not None

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return int(self.k.shape[1])

    @property
    def k_dim(self) -> int:
        """Elements of a key."""
        return int(self.k.shape[3]) * (2 if self.mode == "int4" else 1)

    @property
    def v_dim(self) -> int:
        """Elements of a value."""
        return int(self.v.shape[3]) * (2 if self.mode == "int4" else 1)

    @property
    def num_slots(self) -> int:
        """Slots in the pool; a slot at or above this is refused."""
        return int(self.k.shape[0]) * self.block_size


@dataclass(frozen=True, slots=True)
class LatentPages(Kept):
    """One layer's latents and rotary keys in every page; a view of memory that `KVPool` owns.

    Shapes: `latent [P, S, R]` (uint8 when quantised; `[P, S, R/2]` for INT4, two elements a byte), `rope [P, S, Dr]`,
    `scale [P, S, R/g]` (float16; uint8 for INT4) or None. `mode` is the `KVMode` value. The page axis has the stride of
    a whole page; the others are dense.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    scale: torch.Tensor | None
    mode: str
    rank: int
    block_size: int
    native: list[Any] = field(default_factory=list, compare=False, repr=False)
    """What the native kernels derived from this view, once."""
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """The same of `kept`."""

    @property
    def rope_dim(self) -> int:
        """Width of the rotary key."""
        return int(self.rope.shape[2])

    @property
    def group(self) -> int:
        """Elements of the latent that share a scale; the rank when there is none."""
        return self.rank if self.scale is None else self.rank // int(self.scale.shape[2])

    @property
    def num_slots(self) -> int:
        """Slots in the pool; a slot at or above this is refused."""
        return int(self.latent.shape[0]) * self.block_size


Pages = LayerPages | LatentPages


class PagesByLayer(Protocol):
    """The pages of every layer, each asked for when a step comes to it."""

    def __getitem__(self, layer: int, /) -> Pages: ...
