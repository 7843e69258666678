"""Grouped experts on the C++ library: one call a layer and step, as `native/moe.cpp` explains.

Experts with a weight of a kind that the library's grouped op does not know run by way of `others`, which makes the same
bits of the set's own linear ops.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deepseek_tgi.kernels.expert_scratch import digit_floats
from deepseek_tgi.kernels.library import DenseWeight, ExpertWeights, LayerExperts, NativeLibrary, QuantWeight
from deepseek_tgi.kernels.moe import Expert, Moe, Packed, PackedExperts, check_moe, take_scratch

READING = 4
"""Rows whose products take as long as reading the weights (`ROW_WORTH` of native/moe.cpp)."""


class NativeExperts(PackedExperts):
    """Experts and the C structs that describe them; `address` is the layer's."""

    def __init__(self, num_threads: int, experts: Sequence[Expert], shared: Expert | None) -> None:
        super().__init__(experts, shared)
        everyone = (*self.experts, *(() if shared is None else (shared,)))
        layouts: dict[tuple[int, ...], int] = {}
        rows = [_row(expert, layouts) for expert in everyone]
        self._rows = (ExpertWeights * len(rows))(*rows)
        self._layouts = (ctypes.c_void_p * max(1, len(layouts)))(*layouts.values())
        self._struct = LayerExperts(
            len(self.experts), shared is not None, self.hidden_size, len(layouts), num_threads,
            ctypes.addressof(self._rows), ctypes.addressof(self._layouts),
        )  # fmt: skip
        self.address = ctypes.addressof(self._struct)
        self._sizes = replace(
            self.sizes,
            layouts=max(1, len(layouts)),
            hidden_digits=max(_digits(e.gate_up) for e in everyone),
            inner_digits=max(_digits(e.down) for e in self.experts),
            shared_digits=0 if shared is None else _digits(shared.down),
        )
        self._asked = (0, 0, 0)

    def work(self, num_tokens: int, top_k: int) -> int:
        """Multiply-adds of a call, reading a weight counted as as many as take the same time."""
        choices, sizes = num_tokens * top_k, self.sizes
        routed = sizes.inner * (choices + READING * min(choices, sizes.num_experts))
        return 3 * sizes.hidden * (routed + sizes.shared * (num_tokens + READING))

    def scratch_floats(self, num_tokens: int, top_k: int) -> int:
        """See `PackedExperts`. Remembers the last answer: a step asks once a layer."""
        if self._asked[:2] != (num_tokens, top_k):
            self._asked = (num_tokens, top_k, self._sizes.native_floats(num_tokens, top_k))
        return self._asked[2]


def _row(expert: Expert, layouts: dict[tuple[int, ...], int]) -> ExpertWeights:
    """The C form of one expert; a layout of digits not met before is added to `layouts`, with a weight that has it."""
    gate_up, down = (w.struct for w in (expert.gate_up, expert.down))  # type: ignore[union-attr]
    place = -1
    if expert.order is None and isinstance(gate_up, QuantWeight):
        layout = (gate_up.group_size, gate_up.blocks_per_group, gate_up.width, gate_up.digits)
        layouts.setdefault(layout, ctypes.addressof(gate_up))
        place = list(layouts).index(layout)
    return ExpertWeights(
        isinstance(gate_up, DenseWeight), isinstance(down, DenseWeight), ctypes.addressof(gate_up),
        ctypes.addressof(down), None if expert.order is None else expert.order.data_ptr(), place,
    )  # fmt: skip


def _digits(weight: Packed) -> int:
    """Floats that bound a row of a weight's inputs as it wants them: more than usual in groups of less than 16."""
    struct = weight.struct  # type: ignore[union-attr]
    return digit_floats(weight.in_features if isinstance(struct, DenseWeight) else struct.blocks * struct.width)


def _known(weight: Packed) -> bool:
    return isinstance(getattr(weight, "struct", None), QuantWeight | DenseWeight)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs for so many threads."""

    num_threads: int

    def __call__(self, experts: Sequence[Expert], shared: Expert | None = None) -> PackedExperts:
        """See the contract."""
        everyone = (*experts, *(() if shared is None else (shared,)))
        if all(_known(weight) for expert in everyone for weight in (expert.gate_up, expert.down)):
            return NativeExperts(self.num_threads, experts, shared)
        return PackedExperts(experts, shared)


@dataclass(frozen=True, slots=True)
class MoeOp:
    """The op over one library."""

    library: NativeLibrary
    others: Moe

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: PackedExperts,
        out: torch.Tensor,
        *,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """See the contract."""
        if not isinstance(experts, NativeExperts):
            return self.others(x, ids, weights, experts, out, scratch=scratch)
        check_moe(x, ids, weights, experts, out)
        tokens, top_k = ids.shape
        scratch = take_scratch(scratch, experts.scratch_floats(tokens, top_k))
        self.library.handle(experts.work(tokens, top_k)).dstgi_moe(
            experts.address, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, top_k, out.data_ptr(),
            scratch.data_ptr(),
        )  # fmt: skip
        return None
