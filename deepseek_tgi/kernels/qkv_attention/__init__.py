"""All that happens between the fused q/k/v projection and the output projection, in one call.

`qkv_attention(q [T, H, D], k [T, G, D], v [T, G, Dv], pages, inputs, cos_sin, scale, out=[T, H, Dv], head_norms=None,
frame=None)`
(all four activations) normalises each head of q and k (if asked), rotates both in place, stores k and v in the pages,
and attends; a decode step may leave q and k as they came. It stores the bytes that `rope` and `kv_write` do one after
the other (norms round in another place), and attends as `paged_attention`, perhaps with other cuts of a context; a
decode step makes one call a layer instead of three to five. Every layer of a
step passes the same `inputs` and usually the same buffers: what was derived from them is kept for the next call. In a
recorded step, no kernel ahead of the call writes `inputs` or the pages of earlier tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.frame import Frame
from deepseek_tgi.kernels.pages import LayerPages

__all__ = ["HeadNorms", "QkvAttention"]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm of each query and key head before rotation (Qwen3). Shapes: `q`, `k` `[D] float32`, dense."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class QkvAttention(Protocol):
    """See the module's docstring."""

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
    ) -> torch.Tensor: ...
