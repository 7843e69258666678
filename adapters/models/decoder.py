"""Runs a list of parts between an embedding and an output head: the whole of a model's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_tgi.adapters.layers.embedding import Embedding
from deepseek_tgi.adapters.layers.head import Head
from deepseek_tgi.adapters.layers.part import Part, StepContext
from deepseek_tgi.adapters.layers.rope import RopeTable
from deepseek_tgi.adapters.workspace import StepSizes
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.pages import PagesByLayer
from deepseek_tgi.kernels.select import KernelSet

Buffers = tuple[torch.Tensor, ...]
KEPT_SIZES = 8
"""Step sizes whose cut of the scratch memory is remembered: decode comes back to the same few."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A loaded model: the embedding, the parts in order, the head."""

    embedding: Embedding
    parts: Sequence[Part]
    head: Head
    rope: RopeTable


class Scratch:
    """Owner of the memory all parts share. Grown to the largest step seen, never shrunk.

    Not for two steps at once: one model runs one step at a time.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self._memory = torch.empty(0, dtype=torch.float32, device=device)
        self._cuts: dict[int, list[Buffers]] = {}

    def floats(self, num_tokens: int) -> int:
        """What the part takes that needs most in a step of so many tokens."""
        return max((p.scratch_floats(num_tokens) for p in self._parts), default=0)

    def with_kept(self, num_tokens: int) -> int:
        """As `floats`, with what kernels keep of their own."""
        return self.floats(num_tokens) + max((p.kept_floats(num_tokens) for p in self._parts), default=0)

    def cut(self, num_tokens: int) -> list[Buffers]:
        """Each part's buffers for a step of `num_tokens`."""
        found = self._cuts.get(num_tokens)
        if found is None:
            found = self._make(num_tokens)
            if len(self._cuts) >= KEPT_SIZES:
                del self._cuts[next(iter(self._cuts))]
            self._cuts[num_tokens] = found
        return found

    def _make(self, num_tokens: int) -> list[Buffers]:
        needed = self.floats(num_tokens)
        if needed > self._memory.numel():
            self._cuts.clear()
            self._memory = torch.empty(0, dtype=torch.float32, device=self._device)
            self._memory = torch.empty(needed, dtype=torch.float32, device=self._device)
        shared: dict[tuple[Any, ...], Buffers] = {}
        for part in self._parts:
            if part.binding not in shared:
                shared[part.binding] = part.bind(self._memory, num_tokens)
        return [shared[part.binding] for part in self._parts]


class Decoder:
    """A loaded model that can take steps. Holds no request state."""

    def __init__(self, weights: DecoderWeights, kernels: KernelSet, device: torch.device) -> None:
        self._weights = weights
        self._native = kernels.name == "native"
        self._device = device
        self._scratch = Scratch(weights.parts, device)

    @property
    def weights(self) -> DecoderWeights:
        """What was loaded."""
        return self._weights

    @property
    def parts(self) -> Sequence[Part]:
        """The parts in order."""
        return self._weights.parts

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as held in memory; a tied table counts once."""
        w = self._weights
        return w.embedding.nbytes + sum(p.nbytes for p in w.parts) + w.head.nbytes

    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        """Upper bound of what a step takes beyond weights and cache; see `StepSizes`."""
        head = self._weights.head
        sizes = StepSizes(self._scratch.with_kept, head.norm.size, head.vocab_size, self._native, self.several_ranks)
        return sizes.bytes_of(num_tokens, num_logit_rows)

    def scratch(self, num_tokens: int) -> Scratch:
        """Scratch memory of its own, for steps of up to `num_tokens`: it never moves."""
        scratch = Scratch(self._weights.parts, self._device)
        scratch.cut(num_tokens)
        return scratch

    def forget_scratch(self) -> None:
        """Give the scratch memory back until the next step."""
        self._scratch = Scratch(self._weights.parts, self._device)

    @property
    def ops(self) -> frozenset[str]:
        """Ops of the kernel set that the parts run by themselves."""
        return frozenset(op for part in self._weights.parts for op in part.ops)

    @property
    def several_ranks(self) -> bool:
        """True if this is one rank's part."""
        return self._weights.head.group is not None

    def step(
        self,
        inputs: ForwardInputs,
        pages: PagesByLayer,
        scratch: Scratch | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Raw logits `[R, V] float32` of `inputs.logit_rows`; K/V of all tokens is written to `pages`.

        All tensors lie on the model's device. `scratch` is that of the model unless given; `out` as in `Head`.
        """
        weights = self._weights
        hidden = weights.embedding(inputs.input_ids)  # [T, H], the residual stream
        context = StepContext(inputs, pages, weights.rope.covering(inputs.max_context))
        for part, buffers in zip(weights.parts, (scratch or self._scratch).cut(hidden.shape[0]), strict=True):
            part(hidden, buffers, context)
        return weights.head(hidden, inputs.logit_rows, out)
