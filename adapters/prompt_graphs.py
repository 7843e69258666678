"""Steps of a few hundred tokens, recorded from one attention to the next: the host then launches a layer in two calls.

Choice: what lies between two attentions depends on nothing but the residual stream, so it is recorded for a few numbers
of tokens and replayed for every step that has about as many, prompts and decoding requests alike; attention is launched
as ever, over the tokens there are. Prevents: short prompts, and all who decode beside them, waiting for the host.
Rejected: whole steps, whose attention would be recorded for the longest context; more tokens, for which the GPU takes
longer than the host anyway.

Rows that are over are zeros where they enter. They belong to no request and are stored nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from deepseek_tgi.adapters.decode_graphs import Capture, Replay
from deepseek_tgi.adapters.layers.part import AttentionPart, Part, RowPart, StepContext
from deepseek_tgi.adapters.models.decoder import Buffers, Decoder
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.pages import PagesByLayer

SIZES = (32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""Numbers of tokens that are recorded."""
MOST_PADDING = 64
"""Rows that may be over: more would cost the GPU what the host saves."""
Guard = Callable[[], AbstractContextManager[None]]


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Numbers of tokens worth recording where a step has at most so many."""
    return tuple(size for size in SIZES if size - MOST_PADDING < most)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What is replayed up to an attention, and that one with its buffers."""

    replay: Replay
    part: AttentionPart
    buffers: Buffers


@dataclass(frozen=True, slots=True)
class Recorded:
    """All of a size: the stretches, and what comes after the last attention."""

    stretches: Sequence[Stretch]
    last: Replay


@dataclass(slots=True)
class Begun:
    """A size that is being recorded: the parts to come, the stretches there are, what the next one begins with."""

    size: int
    parts: Iterator[tuple[Part, Buffers]]
    stretches: list[Stretch] = field(default_factory=list)
    works: list[Callable[[], None]] = field(default_factory=list)


class PromptGraphs:
    """Owner of the recorded stretches of one model, and of the memory they work in. For one thread."""

    def __init__(
        self, decoder: Decoder, sizes: Sequence[int], device: torch.device, capture: Capture, guard: Guard = nullcontext
    ) -> None:
        """`guard` is around the first run of a stretch, which other ranks take as well."""
        self._decoder = decoder
        self._capture = capture
        self._guard = guard
        self._left = sorted(sizes, reverse=True)  # smaller ones fit into memory that larger ones left
        self._begun: Begun | None = None
        self._scratch = decoder.scratch(self._left[0])
        self._hidden = torch.zeros(self._left[0], decoder.weights.head.norm.size, device=device)
        self._recorded: dict[int, Recorded] = {}

    @property
    def recorded(self) -> Sequence[int]:
        """Numbers of tokens that can be replayed, ascending."""
        return sorted(self._recorded)

    def record_next(self) -> bool:
        """Record one more stretch; False if none is left. A size of which one cannot be recorded is left out.

        One alone: who comes meanwhile waits for no more, and ranks learn of one that cannot before the next exchange.
        """
        begun, self._begun = self._begun or self._begin(), None
        if begun is None:
            return False
        hidden = self._hidden[: begun.size]
        for part, buffers in begun.parts:
            if isinstance(part, AttentionPart):
                begun.works.append(partial(part.before, hidden, buffers))
                begun.stretches.append(Stretch(self._record(begun.works), part, buffers))
                begun.works = [partial(part.after, hidden, buffers)]
                self._begun = begun
                return True
            assert isinstance(part, RowPart), f"{type(part).__name__} is neither kind of part"
            begun.works.append(partial(part, hidden, buffers))
        self._recorded[begun.size] = Recorded(begun.stretches, self._record(begun.works))
        return True

    def _begin(self) -> Begun | None:
        """The next size; None if none is left."""
        if not self._left:
            return None
        size = self._left.pop(0)
        return Begun(size, zip(self._decoder.parts, self._scratch.cut(size), strict=True))

    def run(self, inputs: ForwardInputs, pages: PagesByLayer) -> torch.Tensor | None:
        """Logits of `inputs`, on the device, if about so many tokens are recorded; else None."""
        count = inputs.input_ids.shape[0]
        size = min((size for size in self._recorded if size >= count), default=None)
        if size is None or size - count > MOST_PADDING:
            return None
        weights, recorded = self._decoder.weights, self._recorded[size]
        hidden = self._hidden[:count]
        hidden.copy_(weights.embedding(inputs.input_ids))
        self._hidden[count:size].zero_()
        context = StepContext(inputs, pages, weights.rope.covering(inputs.max_context))
        views: dict[int, tuple[Buffers, torch.Tensor]] = {}
        for stretch in recorded.stretches:
            stretch.replay()
            found = views.get(id(stretch.buffers))
            if found is None:
                own = tuple(buffer[:count] for buffer in stretch.buffers)
                found = views[id(stretch.buffers)] = own, stretch.buffers[-1][count:]
            own, over = found
            if count < size:
                over.zero_()
            stretch.part.attend(own, context)
        recorded.last()
        return weights.head(hidden, inputs.logit_rows)

    def _record(self, works: Sequence[Callable[[], None]]) -> Replay:
        first = True

        def run() -> None:
            nonlocal first
            with self._guard() if first else nullcontext():
                for work in works:
                    work()
            first = False

        return self._capture(run)
