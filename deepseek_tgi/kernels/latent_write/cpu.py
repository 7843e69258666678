"""Store latents, vectorised over tokens."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.int8_format import HALF_MAX
from deepseek_tgi.kernels.latent_format import quantise_latent
from deepseek_tgi.kernels.latent_write import check_latent_write
from deepseek_tgi.kernels.pages import LatentPages


def latent_write(pages: LatentPages, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
    """See the contract."""
    check_latent_write(pages, latent, rope, slots, ACTIVATIONS)
    latent, rope = latent.float(), rope.float()
    kept = slots >= 0
    if not bool(kept.all()):
        latent, rope, slots = latent[kept], rope[kept], slots[kept]
    if not slots.numel():
        return
    page, place = slots // pages.block_size, slots % pages.block_size
    pages.rope[page, place] = _converted(rope, pages.rope.dtype)
    if pages.scale is None:
        pages.latent[page, place] = _converted(latent, pages.latent.dtype)
    else:
        pages.latent[page, place], pages.scale[page, place] = quantise_latent(latent, pages.mode, pages.group)


def _converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-HALF_MAX, HALF_MAX).to(dtype) if dtype == torch.float16 else x.to(dtype)
