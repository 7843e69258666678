"""The experts of one layer as one grouped computation.

`pack_experts(experts [E], shared | None) -> PackedExperts` takes weights that `pack_int4` or `pack_dense` of the same
set made: `gate_up` packed [2I, H], `down` packed [H, I]. They may differ in kind and group size, within an expert and
between experts; the shared expert, if there is one, may be of another width.
`moe(x [T, H], ids [T, k] int32, weights [T, k] f32, experts, out [T, H] f32, scratch | None) -> None`, x activations,
adds to every row of `out`, one after the other and in ascending order of the token's experts, `weight * down(silu(gate)
* up)`; then, with weight 1, the shared expert's. A weight that is NaN makes its row NaN. `out` is not `x`; the `ids` of
a token differ and lie in 0 .. E-1.

Tokens are sorted by expert; an expert that no token chose is not read; each chosen one runs once. A row's bits do not
depend on what is in the other rows; on a GPU, where experts get many rows, INT4 weights are rounded to bfloat16 once.
`scratch`, a float32 stretch of at least `experts.scratch_floats(T, k)`, spares the call its allocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.common import FLOAT32, Dtypes, PackedDense, PackedInt4, describe, named, refuse
from deepseek_tgi.kernels.expert_scratch import ExpertSizes

__all__ = ["Expert", "Moe", "PackExperts", "Packed", "PackedExperts", "check_moe"]

Packed = PackedInt4 | PackedDense


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert's packed weights.

    `order [H] int32`: input `i` of `gate_up` is element `order[i]` of x (None: element i). `down` takes what `gate_up`
    makes as it comes: whoever packs sorts gate's and up's rows instead.
    """

    gate_up: Packed
    down: Packed
    order: torch.Tensor | None = None

    @property
    def inner_size(self) -> int:
        """I, the expert's width."""
        return self.down.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.nbytes + self.down.nbytes + (0 if self.order is None else self.order.nbytes)


class PackedExperts:
    """The packed weights of a layer's experts; implementations may add to it. Raises `ConfigError` for a misfit."""

    def __init__(self, experts: Sequence[Expert], shared: Expert | None = None) -> None:
        self.experts = tuple(experts)
        self.shared = shared
        everyone = (*self.experts, *(() if shared is None else (shared,)))
        self.hidden_size: int = everyone[0].gate_up.in_features
        self.nbytes = sum(expert.nbytes for expert in everyone)
        for index, expert in enumerate(everyone):
            self._check(index, expert)
        widest = max(expert.inner_size for expert in self.experts)
        own = 0 if shared is None else shared.inner_size
        self.sizes = ExpertSizes.usual(len(self.experts), self.hidden_size, widest, own)

    def scratch_floats(self, num_tokens: int, top_k: int) -> int:
        """Floats of scratch that `moe` uses for so many tokens and choices."""
        return self.sizes.grouped_floats(num_tokens)

    def _check(self, index: int, expert: Expert) -> None:
        hidden = self.hidden_size
        got = [(w.out_features, w.in_features) for w in (expert.gate_up, expert.down)]
        expected = [(2 * expert.inner_size, hidden), (hidden, expert.inner_size)]
        if got != expected:
            raise ConfigError(f"expert {index}: gate_up and down are {got}, expected {expected}")
        order = expert.order
        if order is None:
            return
        if order.dtype is not torch.int32 or not order.is_contiguous():
            raise ConfigError(f"expert {index}: got {describe('order', order)}, expected [{hidden}] int32, contiguous")
        if not torch.equal(order.sort().values.cpu(), torch.arange(hidden, dtype=torch.int32)):
            raise ConfigError(f"expert {index}: {describe('order', order)} is no order of {hidden} inputs")


class PackExperts(Protocol):
    """See the module's docstring."""

    def __call__(self, experts: Sequence[Expert], shared: Expert | None = None) -> PackedExperts: ...


class Moe(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: PackedExperts,
        out: torch.Tensor,
        *,
        scratch: torch.Tensor | None = None,
    ) -> None: ...


def check_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: PackedExperts,
    out: torch.Tensor,
    *,
    dtypes: Dtypes = FLOAT32,
) -> None:
    """Raise `GenerationError` for operands that do not fit. The values of `ids` are the router's promise."""
    shape = (x.shape[0], experts.hidden_size)
    for name, tensor, allowed in (("x", x, dtypes), ("out", out, FLOAT32)):
        if not (tensor.dtype in allowed and tuple(tensor.shape) == shape and tensor.is_contiguous()):
            refuse(f"moe: got {describe(name, tensor)}, expected [T, {shape[1]}] {named(allowed)}, contiguous")
    if not (ids.dtype is torch.int32 and ids.dim() == 2 and ids.shape[0] == shape[0] and ids.is_contiguous()):
        refuse(f"moe: got {describe('ids', ids)}, expected [{shape[0]}, k] int32, contiguous")
    if not (weights.dtype is torch.float32 and weights.shape == ids.shape and weights.is_contiguous()):
        refuse(f"moe: got {describe('weights', weights)}, expected {list(ids.shape)} float32, contiguous")


def take_scratch(scratch: torch.Tensor | None, floats: int, device: torch.device | None = None) -> torch.Tensor:
    """`scratch` if it holds `floats`, fresh memory if there is none. Raises `GenerationError` for too little."""
    if scratch is None:
        return torch.empty(floats, device=device)
    if scratch.dtype is not torch.float32 or scratch.numel() < floats or not scratch.is_contiguous():
        refuse(f"moe: got {describe('scratch', scratch)}, expected {floats} float32, contiguous")
    return scratch
