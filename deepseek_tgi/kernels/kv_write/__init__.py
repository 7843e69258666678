"""Store the step's keys and values in their pages, converting to the pages' number format.

`kv_write(pages, k [T, G, Dk] f32, v [T, G, Dv] f32, slots [T] int64) -> None`. Token `t` goes to block
`slots[t] // S`, place `slots[t] % S`; a negative slot is skipped. k and v may be strided views with dense heads.
float16 saturates at +-65504; INT8 follows `kernels.int8_format`. The bytes of a token depend on its own vectors alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.pages import LayerPages

__all__ = ["KvWrite", "check_kv_write"]


class KvWrite(Protocol):
    """See the module's docstring."""

    def __call__(self, pages: LayerPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None: ...


def check_kv_write(pages: LayerPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Raise `GenerationError` for operands that do not fit or a slot beyond the pool."""
    for name, x, page in (("k", k, pages.k), ("v", v, pages.v)):
        expected = (slots.shape[0], page.shape[1], page.shape[3])
        if not (x.dtype == torch.float32 and tuple(x.shape) == expected):
            refuse(f"kv_write: got {describe(name, x)}, expected {list(expected)} float32")
    if not (slots.dim() == 1 and slots.dtype == torch.int64):
        refuse(f"kv_write: got {describe('slots', slots)}, expected [T] int64")
    highest = int(slots.max()) if slots.numel() else -1
    if not (highest < pages.num_slots):
        refuse(f"kv_write: got slot {highest}, expected below {pages.num_slots}")
