"""The fused call made of its parts, for sets that have no kernel for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.qkv_attention import HeadNorms

if TYPE_CHECKING:
    from deepseek_tgi.kernels.kv_write import KvWrite
    from deepseek_tgi.kernels.paged_attention import PagedAttention
    from deepseek_tgi.kernels.rms_norm import RmsNorm
    from deepseek_tgi.kernels.rope import Rope


@dataclass(frozen=True, slots=True)
class ComposedQkvAttention:
    """One op after the other."""

    rms_norm: RmsNorm
    rope: Rope
    kv_write: KvWrite
    paged_attention: PagedAttention

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        *,
        cos_sin: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        head_norms: HeadNorms | None = None,
        frame: Frame | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        if head_norms is not None:
            self.rms_norm(q, head_norms.q, head_norms.eps, q)
            self.rms_norm(k, head_norms.k, head_norms.eps, k)
        self.rope(q, k, inputs.positions, cos_sin)
        placed = None if frame is None else PlacedFrame(frame, inputs.positions, cos_sin)
        self.kv_write(pages, k, v, inputs.slots, placed)
        return self.paged_attention(q, pages, inputs, scale, out, placed=placed)
