"""Store the step's keys and values in their pages, converting to the pages' number format.

`kv_write(pages, k [T, G, Dk], v [T, G, Dv], slots [T] int64, placed | None) -> None`, k and v activations. Token `t`
goes to block `slots[t] // S`, place `slots[t] % S`; a negative slot is skipped (on a GPU slots are the caller's
promise). k and v may be strided views with dense heads; k is rotated already. float16 saturates at +-65504; INT8, FP8
and INT4 follow `kernels.int8_format`, `fp8_format` and `int4_format`, with the frame that `placed` brings
(`kernels.frame`): whoever attends must be given the same. The bytes of a token depend on its own vectors, its position
and the frame alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import FLOAT32, Dtypes, describe, named, on_host, refuse
from deepseek_tgi.kernels.frame import PlacedFrame, check_frame
from deepseek_tgi.kernels.pages import LayerPages

__all__ = ["KvWrite", "check_kv_write"]


class KvWrite(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        pages: LayerPages,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        placed: PlacedFrame | None = None,
    ) -> None: ...


def check_kv_write(
    pages: LayerPages,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    placed: PlacedFrame | None,
    *,
    dtypes: Dtypes = FLOAT32,
) -> None:
    """Raise `GenerationError` for operands that do not fit or a slot beyond the pool."""
    for name, x, width in (("k", k, pages.k_dim), ("v", v, pages.v_dim)):
        expected = (slots.shape[0], pages.num_heads, width)
        if not (x.dtype in dtypes and tuple(x.shape) == expected):
            refuse(f"kv_write: got {describe(name, x)}, expected {list(expected)} {named(dtypes)}")
    if not (slots.dim() == 1 and slots.dtype == torch.int64):
        refuse(f"kv_write: got {describe('slots', slots)}, expected [T] int64")
    highest = int(slots.max()) if slots.numel() and on_host(slots) else -1
    if not (highest < pages.num_slots):
        refuse(f"kv_write: got slot {highest}, expected below {pages.num_slots}")
    if placed is not None:
        check_frame("kv_write", pages, placed)
        if placed.positions.dtype != torch.int32 or placed.positions.shape != slots.shape:
            refuse(f"kv_write: got {describe('positions', placed.positions)}, expected {list(slots.shape)} int32")
