"""Store latents, one token at a time."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX
from deepseek_tgi.kernels.latent_format import quantise_latent
from deepseek_tgi.kernels.latent_write import check_latent_write
from deepseek_tgi.kernels.pages import LatentPages


def latent_write(pages: LatentPages, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
    """See the contract."""
    check_latent_write(pages, latent, rope, slots)
    for t in range(slots.shape[0]):
        slot = int(slots[t])
        if slot < 0:
            continue
        page, place = divmod(slot, pages.block_size)
        _store(pages.rope, page, place, rope[t])
        if pages.scale is None:
            _store(pages.latent, page, place, latent[t])
        else:
            codes, scale = quantise_latent(latent[t], pages.mode, pages.group)
            pages.latent[page, place], pages.scale[page, place] = codes, scale


def _store(rows: torch.Tensor, page: int, place: int, x: torch.Tensor) -> None:
    if rows.dtype == torch.float16:
        x = x.clamp(-HALF_MAX, HALF_MAX)
    rows[page, place] = x.to(rows.dtype)
