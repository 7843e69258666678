"""The operation made of its parts, for sets that have no kernel for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.pages import LatentPages

if TYPE_CHECKING:
    from deepseek_tgi.kernels.latent_write import LatentWrite
    from deepseek_tgi.kernels.rms_norm import RmsNorm
    from deepseek_tgi.kernels.rope import Rope


@dataclass(frozen=True, slots=True)
class ComposedLatentPrepare:
    """One op after the other."""

    rms_norm: RmsNorm
    rope: Rope
    latent_write: LatentWrite

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
    ) -> None:
        """See the contract."""
        self.rms_norm(latent, norm_weight, eps, latent)
        self.rope(q, rope.unsqueeze(1), inputs.positions, cos_sin)
        self.latent_write(pages, latent, rope, inputs.slots)
