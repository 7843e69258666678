"""A step's inputs on their way to the GPU: packed into one pinned stretch, moved by one copy.

Choice: seven small tensors become one transfer, and the host goes on while it runs; a stretch is written again only
after the copy from it is done. Prevents: seven transfers that each wait for the device, on every token. Rejected: one
stretch alone, which a chunk of a prompt, answered without a read-back, would overwrite on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import refuse

FIELDS = ("input_ids", "slots", "logit_rows", "positions", "cu_seqlens", "cache_lens", "block_tables")
"""Tensors of `ForwardInputs`, the 64-bit ones first, so that all are aligned."""
STRETCHES = 3
_FIRST_BYTES = 1 << 16


class Event(Protocol):
    """When the copies recorded so far are done."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Stretch:
    """Pinned memory, its counterpart on the device, and when the last copy between them ends."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.copied: Event | None = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]


class InputStage:
    """Moves the inputs of one step after the other to `device`. For one calling thread.

    What `move` returned is overwritten `STRETCHES` calls later; by then its step has long been launched, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stretches: list[_Stretch | None] = [None] * STRETCHES
        self._next = 0

    def move(self, inputs: ForwardInputs) -> ForwardInputs:
        """`inputs` with its tensors on the device."""
        tensors = [getattr(inputs, name) for name in FIELDS]
        sizes = [tensor.nbytes for tensor in tensors]
        stretch = self._stretch(sum(sizes))
        _pack(stretch.host, tensors)
        used = sum(sizes)
        stretch.device[:used].copy_(stretch.host[:used], non_blocking=True)
        if stretch.copied is not None:
            stretch.copied.record()
        moved: dict[str, Any] = {}
        at = 0
        for name, tensor, size in zip(FIELDS, tensors, sizes, strict=True):
            moved[name] = stretch.device[at : at + size].view(tensor.dtype).view(tensor.shape)
            at += size
        return replace(inputs, **moved)

    def _stretch(self, num_bytes: int) -> _Stretch:
        index = self._next
        self._next = (index + 1) % STRETCHES
        found = self._stretches[index]
        if found is not None and found.copied is not None:
            found.copied.synchronize()
        if found is None or found.host.numel() < num_bytes:
            size = max(_FIRST_BYTES, 1 << (num_bytes - 1).bit_length())
            found = self._stretches[index] = _Stretch(self._device, size)
        return found


def _pack(host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write `tensors` one behind the other."""
    at = 0
    for tensor in tensors:
        host[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        at += tensor.nbytes


def check_values(inputs: ForwardInputs, vocab_size: int, num_slots: int) -> None:
    """Raise `GenerationError` for ids or slots out of range: on a GPU no kernel looks any more."""
    if not inputs.input_ids.numel():
        return
    low, high = (int(x) for x in inputs.input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        refuse(f"embedding: got ids from {low} to {high}, expected 0 to {vocab_size - 1}")
    highest = int(inputs.slots.max())
    if highest >= num_slots:
        refuse(f"cache write: got slot {highest}, expected below {num_slots}")
