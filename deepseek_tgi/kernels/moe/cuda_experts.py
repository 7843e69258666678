"""A layer's experts packed for the GPU, and how a call's memory and work are cut."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4, describe, refuse
from deepseek_tgi.kernels.moe import Expert, PackedExperts
from deepseek_tgi.kernels.moe.tiles import (
    CHUNK,
    HasTensors,
    TiledInt4,
    padded,
    parts,
    stacked,
    tiled,
    wide,
)

logger = logging.getLogger(__name__)

GROUP_SIZES = (32, 64, 128)
MOST_TOKENS = 2048
"""Tokens that are computed together: their temporaries are as long."""


class CudaExperts(PackedExperts):
    """A layer's experts for this set: codes in tiles if they are all INT4 of one group size, else bfloat16.

    Matrices are the routed experts' in order, then the shared expert's pieces. `inner` is the width of one, padded.
    `kernels` are those that the last calls took, by their numbers of choices.
    """

    def __init__(self, experts: Sequence[Expert], shared: Expert | None = None) -> None:
        super().__init__(experts, shared)
        self.kernels: dict[int, Any] = {}
        self.num_experts = len(self.experts)
        widest = max(expert.inner_size for expert in self.experts)
        self.inner = padded(widest, CHUNK)
        self.pieces = 0 if shared is None else -(-shared.inner_size // self.inner)
        self.gate_up: TiledInt4 | None = None
        self.down: TiledInt4 | None = None
        self.dense: tuple[torch.Tensor, torch.Tensor] | None = None
        reason = self._why_dense()
        scale_dtype = None if reason else self._scale_dtype()
        if scale_dtype is not None:
            self.gate_up, self.down = self._tiles(scale_dtype)
            self.nbytes = self.gate_up.nbytes + self.down.nbytes
        else:
            logger.warning("experts: %s; they are kept in bfloat16", reason or "their scales need more than 16 bits")
            self.dense = self._stacks()
            self.nbytes = sum(weight.nbytes for weight in self.dense)
        # The packed forms hold all there is; what the set packed one by one may go.
        self.experts, self.shared = (), None

    def scratch_floats(self, num_tokens: int, top_k: int) -> int:
        """See `PackedExperts`."""
        return 0 if self.dense is not None else Cuts.of(self, min(num_tokens, MOST_TOKENS), top_k).floats

    def _why_dense(self) -> str | None:
        """Why the codes cannot be read as they are, if so."""
        everyone = (*self.experts, *(() if self.shared is None else (self.shared,)))
        weights = [weight for expert in everyone for weight in (expert.gate_up, expert.down)]
        if not all(isinstance(weight, PackedInt4) and isinstance(weight, HasTensors) for weight in weights):
            return "not all experts are INT4"
        sizes = {weight.group_size for weight in weights if isinstance(weight, PackedInt4)}
        if len(sizes) != 1 or not sizes <= set(GROUP_SIZES):
            return f"groups of {sorted(sizes)} inputs, expected one of {GROUP_SIZES} for all"
        if any(expert.order is not None for expert in everyone):
            return "inputs are stored in another order than they come in"
        if self.hidden_size % 8:
            return f"a hidden size of {self.hidden_size}, expected a multiple of 8"
        return None

    def _scale_dtype(self) -> torch.dtype | None:
        """The first 16-bit float that holds every scale exactly."""
        fitting = [torch.float16, torch.bfloat16]
        for matrices in self._pieces():
            for matrix in matrices:
                wide = matrix.scales.float()
                fitting = [dtype for dtype in fitting if torch.equal(wide.to(dtype).float(), wide)]
        return fitting[0] if fitting else None

    def _tiles(self, scale_dtype: torch.dtype) -> tuple[TiledInt4, TiledInt4]:
        gate_up, down = [], []
        for own, below in self._pieces():
            unit = max(CHUNK, own.group_size)
            gate_up.append(tiled(own, padded(self.hidden_size, unit), scale_dtype))
            down.append(tiled(below, padded(self.inner, unit), scale_dtype))
        return stacked(gate_up), stacked(down)

    def _pieces(self) -> Iterator[tuple[Int4Tensors, Int4Tensors]]:
        """Gate over up, and down, of every matrix."""
        for expert in self.experts:
            yield parts(expert, 0, expert.inner_size, self.inner)
        if self.shared is not None:
            for first in range(0, self.shared.inner_size, self.inner):
                yield parts(self.shared, first, min(first + self.inner, self.shared.inner_size), self.inner)

    def _stacks(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = [], []
        for expert in (*self.experts, *(() if self.shared is None else (self.shared,))):
            own, below = wide(expert.gate_up), wide(expert.down)
            if expert.order is not None:
                in_order = torch.empty_like(own)
                in_order[:, expert.order.long()] = own
                own = in_order
            gate, up = own.chunk(2)
            for first in range(0, expert.inner_size, self.inner):
                pad = self.inner - min(self.inner, expert.inner_size - first)
                rows = slice(first, first + self.inner)
                halves = [torch.nn.functional.pad(part[rows], (0, 0, 0, pad)) for part in (gate, up)]
                gate_up.append(torch.cat(halves).bfloat16())
                down.append(torch.nn.functional.pad(below[:, rows], (0, pad)).bfloat16())
        return torch.stack(gate_up), torch.stack(down)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the scratch memory is cut for a number of tokens; all counts are of float32."""

    pairs: int
    tiles: int
    gated: int
    products: int

    @classmethod
    def of(cls, experts: CudaExperts, num_tokens: int, top_k: int) -> Cuts:
        """For so many tokens and choices."""
        pairs = num_tokens * (top_k + experts.pieces)
        tiles = most_groups(experts, num_tokens, top_k, sorted_rows(num_tokens * top_k / experts.num_experts))
        return cls(pairs, tiles, pairs * experts.inner // 2, pairs * experts.hidden_size)

    @property
    def floats(self) -> int:
        """Of all parts, each on a 64-byte line."""
        return sum(padded(n, 16) for n in (self.pairs, 3 * self.tiles + 1, self.gated, self.products))

    def cut(self, scratch: torch.Tensor) -> Parts:
        """The parts of `scratch`, dense float32. Raises `GenerationError` if it is too short for them."""
        if scratch.numel() < self.floats or scratch.dtype is not torch.float32:
            refuse(f"moe: got {describe('scratch', scratch)}, expected {self.floats} float32")
        total = scratch.data_ptr() + 4 * padded(self.pairs, 16)
        gated = total + 4 * padded(3 * self.tiles + 1, 16)
        return Parts(scratch.data_ptr(), total + 4, total, gated, gated + 4 * padded(self.gated, 16))


@dataclass(frozen=True, slots=True)
class Parts:
    """Addresses in a call's scratch: of `order`, `tiles`, `total` int32, `gated` bfloat16, `products` float32; see
    `sources/moe.cu`. Tensors would take longer to make than kernels to launch.
    """

    order: int
    tiles: int
    total: int
    gated: int
    products: int


def sorted_rows(expected: float) -> int:
    """Pairs of an expert that warps multiply together where each gets about so many: weights are read once for them."""
    return 8 if expected <= 7 else 16 if expected <= 17 else 32


def most_groups(experts: CudaExperts, num_tokens: int, top_k: int, rows: int) -> int:
    """Most groups of at most `rows` sorted pairs of an expert, however the router chooses."""
    pairs = num_tokens * top_k
    own = experts.pieces * -(-num_tokens // rows)
    return min(pairs, min(pairs, experts.num_experts) + pairs // rows) + own
