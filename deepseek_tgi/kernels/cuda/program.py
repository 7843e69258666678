"""What an op says of a kernel it wants, and what it gets to call. No CUDA here: tests bring another `Programs`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

SOURCE_FOLDER = Path(__file__).with_name("sources")

Shape = tuple[int, int, int]

KINDS = frozenset("pilft")


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tensor that the copy engine reads in boxes (sm_90): `box` counts elements along each of its axes.

    The last axis is dense; strides and the start are aligned to 16 bytes. Boxes of 16-bit elements are 64 wide and come
    to shared memory with the 16-byte parts of line i in the order `part ^ (i % 8)`; others come as they are.
    """

    tensor: torch.Tensor
    box: tuple[int, ...]
    kept: list[Any] = field(default_factory=list, compare=False, repr=False)
    """What a launch made of it, for the next one."""


Argument = torch.Tensor | Tiles | int | float | None


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One compiled kernel: function `name` of `sources/<source>.cu` under the macros `defines`.

    `signature` has a letter for each parameter: `p` a pointer (a tensor, or None), `i` a 32-bit and `l` a 64-bit
    integer, `f` a float, `t` a `tile_map` (`Tiles`). `shared_bytes` is the dynamic shared memory of every launch.
    `beside`: its blocks are to lie on a multiprocessor beside those of the kernel ahead or behind that also says so, as
    far as memory goes.
    """

    source: str
    name: str
    signature: str
    defines: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0
    beside: bool = False
    _hash: int = field(init=False, compare=False, repr=False)
    """Worked out once: kernels are looked up at every launch."""

    def __post_init__(self) -> None:
        assert set(self.signature) <= KINDS, f"{self.name}: signature {self.signature!r}"
        object.__setattr__(self, "_hash", hash(self._all))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return KernelSpec, self._all  # another process hashes strings in its own way

    @property
    def _all(self) -> tuple[Any, ...]:
        return self.source, self.name, self.signature, self.defines, self.shared_bytes, self.beside

    @property
    def flags(self) -> tuple[str, ...]:
        """The macros as the compiler wants them."""
        return tuple(f"-D{key}={value}" for key, value in self.defines)


class Kernel(Protocol):
    """A loaded kernel; enqueues itself on torch's current stream.

    `grid` and `block` count blocks and threads. With `overlap` the launch may begin before the kernel ahead of it ends
    (sm_90; the kernel waits for it where its source says so).
    """

    def __call__(self, grid: Shape, block: int, arguments: Sequence[Argument], *, overlap: bool = False) -> None: ...


class Programs(Protocol):
    """Gives kernels, each compiled once."""

    def kernel(self, spec: KernelSpec) -> Kernel: ...


@functools.lru_cache(maxsize=4096)  # asked for at every launch
def spec(source: str, name: str, signature: str, shared_bytes: int = 0, **defines: int) -> KernelSpec:
    """A `KernelSpec` with its macros as keywords."""
    return KernelSpec(source, name, signature, tuple(sorted(defines.items())), shared_bytes)
