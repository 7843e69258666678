"""The routed experts of one layer as one grouped computation.

`pack_experts(gate_up: [E] packed [2I, H], down: [E] packed [H, I]) -> PackedExperts` takes weights that `pack_int4` or
`pack_dense` of the same set made; an expert's two may differ in kind from each other and from other experts'.
`moe(x [T, H] f32, ids [T, k] int32, weights [T, k] f32, experts, out [T, H] f32) -> None` adds to `out`, for every
token, the sum over its k choices of `weight * down(silu(gate) * up)` of that expert, in the order of `ids`. Tokens are
sorted by expert; an expert that no token chose is not read; each chosen one runs once. A row's bits do not depend on
the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from deepseek_tgi.kernels.common import PackedDense, PackedInt4, describe, refuse

__all__ = ["Moe", "PackExperts", "PackedExperts", "check_moe"]

Packed = PackedInt4 | PackedDense


class PackedExperts:
    """The packed weights of all experts of a layer; implementations may add to it."""

    __slots__ = ("down", "gate_up", "nbytes")

    def __init__(self, gate_up: Sequence[Packed], down: Sequence[Packed]) -> None:
        self.gate_up = tuple(gate_up)
        self.down = tuple(down)
        self.nbytes = sum(weight.nbytes for weight in (*self.gate_up, *self.down))

    @property
    def inner_size(self) -> int:
        """I, the width of an expert."""
        return self.down[0].in_features


class PackExperts(Protocol):
    """See the module's docstring."""

    def __call__(self, gate_up: Sequence[Packed], down: Sequence[Packed]) -> PackedExperts: ...


class Moe(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: PackedExperts,
        out: torch.Tensor,
    ) -> None: ...


def check_moe(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: PackedExperts, out: torch.Tensor
) -> None:
    """Raise `GenerationError` for operands that do not fit. The values of `ids` are the router's promise."""
    width = experts.gate_up[0].in_features
    for name, tensor in (("x", x), ("out", out)):
        if not (
            tensor.dtype == torch.float32 and tuple(tensor.shape) == (x.shape[0], width) and tensor.is_contiguous()
        ):
            refuse(f"moe: got {describe(name, tensor)}, expected [T, {width}] float32, contiguous")
    if not (ids.dtype == torch.int32 and ids.dim() == 2 and ids.shape[0] == x.shape[0]):
        refuse(f"moe: got {describe('ids', ids)}, expected [{x.shape[0]}, k] int32")
    if not (weights.dtype == torch.float32 and weights.shape == ids.shape):
        refuse(f"moe: got {describe('weights', weights)}, expected {list(ids.shape)} float32")
