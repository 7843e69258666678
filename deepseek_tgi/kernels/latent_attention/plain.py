"""Attention in latent space with torch's operators that ask the device for nothing: for pages that no kernel reads.

INT4 latents are taken as they are stored, in the rotated space of their groups.
"""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.latent_format import dequantise_latent, dequantise_rotated
from deepseek_tgi.kernels.pages import LatentPages


def read_context(
    pages: LatentPages, blocks: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `0:length` of the requests with `blocks [..., P]`: latents and rotary keys `[..., L, _]`."""
    used = blocks[..., : -(-length // pages.block_size)].long()
    codes, rope = (t[used].flatten(-3, -2)[..., :length, :] for t in (pages.latent, pages.rope))
    if pages.scale is None:
        return codes.to(dtype), rope.to(dtype)
    scale = pages.scale[used].flatten(-3, -2)[..., :length, :]
    wide = dequantise_rotated(codes, scale) if pages.mode == "int4" else dequantise_latent(codes, scale, pages.mode)
    return wide.to(dtype), rope.to(dtype)


def attend(
    absorbed: torch.Tensor,
    rotary: torch.Tensor,
    pages: LatentPages,
    step: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    capacity: int,
) -> torch.Tensor:
    """`softmax(scale * (absorbed latent + rotary rope)) latent` of one token a request: `[H, B, R]`, as queries are.

    `absorbed [H, B, R]`, `rotary [H, B, Dr]`; `step` are the block tables and what is cached of each request.
    `capacity` is at least the longest context.
    """
    tables, cached = step
    latent, rope = read_context(pages, tables, capacity, torch.float32)
    beyond = torch.arange(latent.shape[1], device=latent.device) > cached.unsqueeze(1)  # perhaps never written
    latent = latent.masked_fill(beyond.unsqueeze(2), 0.0)
    queries = torch.cat((absorbed, rotary), 2).transpose(0, 1).float()  # [B, H, R + Dr]
    scores = queries @ torch.cat((latent, rope), 2).transpose(1, 2) * scale
    weights = scores.masked_fill(beyond.unsqueeze(1), float("-inf")).softmax(-1)
    return (weights @ latent).transpose(0, 1).to(absorbed.dtype)
