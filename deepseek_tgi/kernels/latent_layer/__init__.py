"""All that happens between the projections of latent attention (MLA), in one call.

`latent_layer(q [T, H, Dr + Dn], latent [T, R], rope [T, Dr], pages: LatentPages, inputs, up, norm_weight, eps, cos_sin,
scale, out [T, H, Dv], form="auto") -> out` is `latent_prepare`, then `latent_attention`, with one difference: what it
leaves in `q`, `latent` and `rope` is anyone's guess. A set that has nothing of its own for it has None in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from deepseek_tgi.core import ForwardInputs
    from deepseek_tgi.kernels.latent_attention import PackedUp
    from deepseek_tgi.kernels.pages import LatentPages

__all__ = ["LatentLayer"]


class LatentLayer(Protocol):
    """See the module's docstring."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        pages: LatentPages,
        inputs: ForwardInputs,
        *,
        up: PackedUp,
        norm_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        form: str = "auto",
    ) -> torch.Tensor: ...
