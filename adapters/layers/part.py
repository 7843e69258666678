"""What a decoder runs: parts that read the residual stream and add to it, with scratch memory they do not own.

Choice: every part states how many floats of scratch a token needs and gets one shared stretch of memory, cut into its
buffers once for each step size. Prevents: allocations inside the layer loop, and each kind of layer growing its own
buffers. Rejected: tensors returned from part to part, which would allocate 4 tensors a layer on every token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from deepseek_tgi.adapters.workspace import padded, padded_floats
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.pages import LatentPages, LayerPages, PagesByLayer

__all__ = ["AttentionPart", "Part", "RowPart", "StepContext", "cut", "floats_of", "padded"]


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every part of one step sees. `pages[i]` belongs to layer i; `cos_sin [P, D] float32` covers the step."""

    inputs: ForwardInputs
    pages: PagesByLayer
    cos_sin: torch.Tensor

    def head_pages(self, layer: int) -> LayerPages:
        """The keys and values of `layer`."""
        pages = self.pages[layer]
        assert isinstance(pages, LayerPages), "the adapter's layout follows its attention"
        return pages

    def latent_pages(self, layer: int) -> LatentPages:
        """The latents of `layer`."""
        pages = self.pages[layer]
        assert isinstance(pages, LatentPages), "the adapter's layout follows its attention"
        return pages


class Part(ABC):
    """One residual part: `hidden += f(norm(hidden))`. `ops` names the ops of the kernel set that it runs by itself."""

    ops: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def scratch_floats(self, num_tokens: int) -> int:
        """Floats of scratch that a step of so many tokens needs; never fewer for more tokens."""

    def kept_floats(self, num_tokens: int) -> int:
        """Floats that the part's kernels keep of their own after a step of so many tokens; all parts share them."""
        return 0

    @property
    @abstractmethod
    def binding(self) -> tuple[Any, ...]:
        """Parts of equal `binding` cut scratch alike and share the result of `bind`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weights as held in memory."""

    @abstractmethod
    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Cut `scratch`, at least `scratch_floats(num_tokens)` float32, into this part's buffers for so many tokens."""

    @abstractmethod
    def __call__(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        """Add this part's output to `hidden [T, H] float32` in place, using what `bind` made."""


class RowPart(Part):
    """A part that looks at the stream alone, and can be recorded for any step of so many tokens."""

    @abstractmethod
    def __call__(
        self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext | None = None
    ) -> None:
        """See `Part`."""


class AttentionPart(Part):
    """A part in three, of which only the middle one looks at the step: the others can be recorded for any.

    Every buffer has a row for each token; the last one is all that `after` reads.
    """

    def __call__(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        """See `Part`."""
        self.before(hidden, buffers)
        self.attend(buffers, step)
        self.after(hidden, buffers)

    @abstractmethod
    def before(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...]) -> None:
        """Make queries, keys and values."""

    @abstractmethod
    def attend(self, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        """Store keys and values, and attend."""

    @abstractmethod
    def after(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...]) -> None:
        """Add what was attended to."""


def cut(
    scratch: torch.Tensor, num_tokens: int, widths: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Consecutive dense buffers `[num_tokens, width]` of `dtype` from `scratch`, float32, each on an aligned start."""
    items, per_float = scratch.view(dtype), 4 // dtype.itemsize
    buffers, at = [], 0
    for width in widths:
        buffers.append(items[at : at + num_tokens * width].view(num_tokens, width))
        at += num_tokens * padded_floats(width, dtype.itemsize) * per_float
    return buffers


def floats_of(widths: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """Floats of scratch that `cut` takes of each token for `widths`."""
    return sum(padded_floats(width, dtype.itemsize) for width in widths)
