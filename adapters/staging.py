"""A step's inputs on their way to the GPU: packed into one pinned stretch, moved by one copy.

Choice: seven small tensors become one transfer, and the host goes on while it runs; a stretch is written again only
after the copy from it is done. Prevents: seven transfers that each wait for the device, on every token. Rejected: one
stretch alone, for which the next chunk of a prompt, whose steps are not read back, would have to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import refuse

FIELDS = ("input_ids", "slots", "logit_rows", "positions", "cu_seqlens", "cache_lens", "block_tables")
"""Tensors of `ForwardInputs`, the 64-bit ones first, so that all are aligned."""
STRETCHES = 3
FEW = 64
_FIRST_BYTES = 1 << 16


class Event(Protocol):
    """When the copies recorded so far are done."""

    def record(self, stream: torch.Stream) -> None: ...

    def synchronize(self) -> None: ...


class PinnedRing:
    """Host memory that copies to `device` start from, in turns. For one calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._memory: list[torch.Tensor | None] = [None] * STRETCHES
        self._copied: list[Event | None] = [None] * STRETCHES
        self._next = 0

    @contextmanager
    def stretch(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """`[num_bytes] uint8` to be written and copied from, without waiting for the copy, within the context."""
        index = self._next
        self._next = (index + 1) % STRETCHES
        copied, memory = self._copied[index], self._memory[index]
        if copied is not None:
            copied.synchronize()
        if memory is None or memory.numel() < num_bytes:
            size = max(_FIRST_BYTES, 1 << (num_bytes - 1).bit_length())
            memory = self._memory[index] = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        yield memory[:num_bytes]
        if self._on_gpu:
            if copied is None:
                copied = self._copied[index] = torch.Event(self._device)
            # Named, for without it an event is recorded on the stream of whatever device is current.
            copied.record(torch.cuda.current_stream(self._device))


class InputStage:
    """Moves the inputs of one step after the other to `device`. For one calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = PinnedRing(device)

    def move(self, inputs: ForwardInputs) -> ForwardInputs:
        """`inputs` with its tensors on the device."""
        tensors = [getattr(inputs, name) for name in FIELDS]
        with self._ring.stretch(sum(tensor.nbytes for tensor in tensors)) as host:
            _pack(host, tensors)
            packed = torch.empty(host.shape, dtype=torch.uint8, device=self._device)
            packed.copy_(host, non_blocking=True)
        moved: dict[str, Any] = {}
        at = 0
        for name, tensor in zip(FIELDS, tensors, strict=True):
            moved[name] = packed[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            at += tensor.nbytes
        lengths = inputs.cu_seqlens.tolist(), inputs.cache_lens.tolist()
        return replace(inputs, **moved, host_lengths=lengths)


def _pack(host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write `tensors` one behind the other."""
    at = 0
    for tensor in tensors:
        host[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        at += tensor.nbytes


def check_values(inputs: ForwardInputs, vocab_size: int, num_slots: int) -> None:
    """Raise `GenerationError` for ids or slots out of range: on a GPU no kernel looks any more."""
    low, high = _range(inputs.input_ids)
    if low < 0 or high >= vocab_size:
        refuse(f"embedding: got ids from {low} to {high}, expected 0 to {vocab_size - 1}")
    check_slots(inputs, num_slots)


def check_slots(inputs: ForwardInputs, num_slots: int) -> None:
    """The half of `check_values` that does not ask for ids."""
    _, highest = _range(inputs.slots)
    if highest >= num_slots:
        refuse(f"cache write: got slot {highest}, expected below {num_slots}")


def _range(values: torch.Tensor) -> tuple[int, int]:
    """The least and the largest; 0, -1 of nothing."""
    if values.shape[0] <= FEW:  # what a decode step has: an operator takes longer than a list
        numbers = values.tolist()
        return min(numbers, default=0), max(numbers, default=-1)
    low, high = values.aminmax()
    return int(low), int(high)
