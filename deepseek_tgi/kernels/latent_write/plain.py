"""Store latents with torch's operators that ask the device for nothing: for pages that no kernel writes."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX
from deepseek_tgi.kernels.latent_format import quantise_latent
from deepseek_tgi.kernels.pages import LatentPages


def latent_write(pages: LatentPages, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
    """See the contract. Skipped tokens write what the first kept one writes, or what is there if none is kept."""
    if not slots.numel():
        return
    kept = slots >= 0
    row = torch.where(kept, torch.arange(len(slots), device=slots.device), kept.int().argmax())
    latent, rope, slots = latent[row].float(), rope[row].float(), slots[row].clamp(min=0)
    parts = [(pages.rope, _converted(rope, pages.rope.dtype))]
    if pages.scale is None:
        parts.append((pages.latent, _converted(latent, pages.latent.dtype)))
    else:
        parts += zip((pages.latent, pages.scale), quantise_latent(latent, pages.mode, pages.group), strict=True)
    page, place = slots // pages.block_size, slots % pages.block_size
    for store, rows in parts:
        store[page, place] = torch.where(kept.any(), rows, store[page, place])


def _converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.clamp(-HALF_MAX, HALF_MAX).to(dtype) if dtype == torch.float16 else x.to(dtype)
