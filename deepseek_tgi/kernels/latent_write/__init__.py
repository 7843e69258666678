"""Store the step's latents and rotary keys in their pages, converting to the pages' number format.

`latent_write(pages: LatentPages, latent [T, R], rope [T, Dr], slots [T] int64) -> None`, both activations. Token `t`
goes to block `slots[t] // S`, place `slots[t] % S`; a negative slot is skipped (on a GPU slots are the caller's
promise). Both may be strided views with dense rows. float16 saturates at +-65504; quantised latents follow
`kernels.latent_format`. A token's bytes depend on it alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import FLOAT32, Dtypes, describe, named, on_host, refuse
from deepseek_tgi.kernels.pages import LatentPages

__all__ = ["LatentWrite", "check_latent_write"]


class LatentWrite(Protocol):
    """See the module's docstring."""

    def __call__(self, pages: LatentPages, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None: ...


def check_latent_write(
    pages: LatentPages, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor, dtypes: Dtypes = FLOAT32
) -> None:
    """Raise `GenerationError` for operands that do not fit or a slot beyond the pool."""
    for name, x, width in (("latent", latent, pages.rank), ("rope", rope, pages.rope_dim)):
        expected = (slots.shape[0], width)
        if not (x.dtype in dtypes and tuple(x.shape) == expected):
            refuse(f"latent_write: got {describe(name, x)}, expected {list(expected)} {named(dtypes)}")
    if not (slots.dim() == 1 and slots.dtype == torch.int64):
        refuse(f"latent_write: got {describe('slots', slots)}, expected [T] int64")
    highest = int(slots.max()) if slots.numel() and on_host(slots) else -1
    if not (highest < pages.num_slots):
        refuse(f"latent_write: got slot {highest}, expected below {pages.num_slots}")
