"""What latent attention (MLA) needs between its projections and the attention itself, as one operation.

`latent_prepare(q [T, H, D], latent [T, R], rope [T, Dr], pages: LatentPages, inputs, norm_weight [R] f32, eps, cos_sin)
-> None`, the first three activations, replaces `latent` by its RMS norm, turns the first elements of every query head
and the rotary key in place (`rope` with `inputs.positions` and `cos_sin`), and stores latent and key at `inputs.slots`.
Bits are those of `rms_norm`, `rope` and `latent_write` one after the other. `latent` and `rope` may be strided views
with dense rows.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.pages import LatentPages

__all__ = ["LatentPrepare"]


class LatentPrepare(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        pages: LatentPages,
        inputs: ForwardInputs,
        *,
        norm_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
    ) -> None: ...
