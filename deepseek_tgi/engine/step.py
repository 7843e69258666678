"""What one forward is fed: a prepared plan while all requests decode, ragged lists while prompts are unfinished."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.engine.prefix_guard import PrefixGuard
from deepseek_tgi.engine.sequence import Sequence
from deepseek_tgi.logits.pipeline import SamplingPlan


class DecodePlan:
    """Tensors of a batch in which every request feeds its newest token; moved on in place, step by step.

    Owned by the batch it was made for. A changed batch gets a new plan, so a step costs a dozen small tensor
    operations whatever the number of requests.
    """

    def __init__(self, sequences: Items[Sequence], guard: PrefixGuard, block_size: int, sampling: SamplingPlan) -> None:
        self.sampling = sampling
        self._guard = guard
        self._block_size = block_size
        cached = [s.cache_len for s in sequences]
        self._ids = torch.tensor([s.ids[-1] for s in sequences], dtype=torch.int64)
        self._positions = torch.tensor(cached, dtype=torch.int32)
        self._tables = pad_sequence([s.blocks for s in sequences], batch_first=True)
        self._rows = torch.arange(len(sequences))
        self._offsets = torch.arange(len(sequences) + 1, dtype=torch.int32)
        self._history = guard.history(self._slots_of(self._positions.long() - 1))
        self._history_is_new = False
        self._max_context = max(cached) + 1
        self._slots: torch.Tensor | None = None
        self._steps_in_block = 0

    def inputs(self) -> ForwardInputs:
        """The next step; its tensors are changed by `move_on`."""
        self._history_is_new = False
        if self._slots is None:
            positions = self._positions.long()
            self._slots = self._slots_of(positions)
            self._steps_in_block = self._block_size - int((positions % self._block_size).max())
        return ForwardInputs(
            input_ids=self._ids,
            positions=self._positions,
            slots=self._slots,
            cu_seqlens=self._offsets,
            block_tables=self._tables,
            cache_lens=self._positions,
            logit_rows=self._rows,
            max_seqlen=1,
            max_context=self._max_context,
        )

    def history(self) -> torch.Tensor:
        """Numbers of the histories that the step of `inputs` stores, `[B] int64`; asked for before `move_on`.

        Worked out when asked for: a GPU that was given the step is at work meanwhile.
        """
        if not self._history_is_new:
            self._history += self._guard.numbers(self._ids, self._positions)
            self._history_is_new = True
        return self._history

    def move_on(self) -> None:
        """Go on with tokens that are not known yet; `name` tells them."""
        self._positions = self._positions + 1
        self._max_context += 1
        self._steps_in_block -= 1
        self._slots = None if self._slots is None or not self._steps_in_block else self._slots + 1

    def name(self, token_ids: torch.Tensor) -> None:
        """Take the tokens `[B] int64` that the step feeds; before `history`."""
        self._ids = token_ids

    def _slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        block = self._tables.gather(1, (positions // self._block_size).unsqueeze(1)).squeeze(1)
        return block * self._block_size + positions % self._block_size


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """A step in which some prompts are unfinished.

    `written [W] int64` are the slots that get stored, `history [W] int64` the numbers of what they hold; `producing`
    the requests whose next token is chosen, `sample_rows` their rows of the logits; `prompt_rows` the requests whose
    prompt is scored, with their rows.
    """

    inputs: ForwardInputs
    written: torch.Tensor
    history: torch.Tensor
    producing: list[Sequence]
    sample_rows: list[int]
    prompt_rows: list[tuple[Sequence, range]]


def ragged_step(sequences: Items[Sequence], guard: PrefixGuard, block_size: int) -> RaggedStep:
    """Feed `next_tokens` of each request, prompts and decodes alike, in one forward."""
    counts = [s.next_tokens for s in sequences]
    cached = [s.cache_len for s in sequences]
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ids = torch.tensor([i for s in sequences for i in s.ids[s.cache_len : s.cache_len + s.next_tokens]])
    positions = torch.cat([torch.arange(c, c + n, dtype=torch.int32) for c, n in zip(cached, counts, strict=True)])
    slots = torch.cat([s.slots(s.cache_len, s.cache_len + s.next_tokens, block_size) for s in sequences])
    history = _histories(sequences, guard, guard.numbers(ids, positions), block_size)
    stored = _stored_already(sequences, offsets, slots, history, guard)
    logit_rows, producing, sample_rows, prompt_rows = _wanted_rows(sequences, offsets.tolist())
    inputs = ForwardInputs(
        input_ids=ids,
        positions=positions,
        slots=slots.masked_fill(stored, -1),
        cu_seqlens=offsets,
        block_tables=pad_sequence([s.blocks for s in sequences], batch_first=True),
        cache_lens=torch.tensor(cached, dtype=torch.int32),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        max_seqlen=max(counts),
        max_context=max(c + n for c, n in zip(cached, counts, strict=True)),
    )
    return RaggedStep(inputs, slots[~stored], history[~stored], producing, sample_rows, prompt_rows)


def _stored_already(
    sequences: Items[Sequence], offsets: torch.Tensor, slots: torch.Tensor, history: torch.Tensor, guard: PrefixGuard
) -> torch.Tensor:
    """`[T] bool`: the last token of each prompt that was found whole. It is computed for its logits alone.

    Choice: it is not stored again. Prevents: a block changing under other requests that read it, by the bits in which
    kernels that sum in another order for another batch differ. Rejected: trusting every kernel to be exact.
    """
    stored = torch.zeros(len(slots), dtype=torch.bool)
    for sequence, row in zip(sequences, offsets.tolist(), strict=False):
        if 0 < sequence.cache_len == sequence.prompt_length - 1 and sequence.request.cache_len:
            stored[row] = bool(guard.history(slots[row]) == history[row])
    return stored


def _wanted_rows(
    sequences: Items[Sequence], offsets: list[int]
) -> tuple[list[int], list[Sequence], list[int], list[tuple[Sequence, range]]]:
    rows: list[int] = []
    producing: list[Sequence] = []
    sample_rows: list[int] = []
    prompt_rows: list[tuple[Sequence, range]] = []
    for sequence, start, stop in zip(sequences, offsets, offsets[1:], strict=False):
        ends = sequence.cache_len + sequence.next_tokens == len(sequence.ids)
        if sequence.prompt_logprobs is not None and not sequence.decoding:
            prompt_rows.append((sequence, range(len(rows), len(rows) + stop - start)))
            rows.extend(range(start, stop))
        elif ends:
            rows.append(stop - 1)
        if ends:
            producing.append(sequence)
            sample_rows.append(len(rows) - 1)
    return rows, producing, sample_rows, prompt_rows


def _histories(sequences: Items[Sequence], guard: PrefixGuard, numbers: torch.Tensor, block_size: int) -> torch.Tensor:
    parts = []
    chunks = torch.split(numbers, [s.next_tokens for s in sequences])
    for sequence, own in zip(sequences, chunks, strict=True):
        history = own.cumsum(0)
        if sequence.cache_len:
            history += guard.history(sequence.slots(sequence.cache_len - 1, sequence.cache_len, block_size))
        parts.append(history)
    return torch.cat(parts)
