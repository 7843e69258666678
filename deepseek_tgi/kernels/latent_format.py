"""The number formats of a cached latent (MLA), in plain torch.

A latent is cut into groups that share one float16 scale; `x = code * scale`. INT8: codes -127..127. INT4: codes -8..7,
element `2i` in the low nibble of byte `i` and `2i + 1` in the high one. FP8: E4M3 with the group's largest magnitude at
448. The scale is rounded up to float16, so nothing is clipped.
Choice: symmetric, since a latent leaves an RMS norm and lies around 0. Rejected: a zero for each group, which costs as
much as halving the group.
"""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX, half_towards

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8_e4m3fn": 448.0}
"""Largest code of each quantised mode."""


def quantise_latent(x: torch.Tensor, mode: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x [..., R] float32`: codes `[..., R] uint8` (`[..., R/2]` for INT4), scales `[..., R/group] float16`.

    Values beyond float16 saturate at +-65504; a group holding NaN gets a NaN scale, so that it reads back as NaN.
    """
    parts = x.float().clamp(-HALF_MAX, HALF_MAX).reshape(*x.shape[:-1], -1, group)
    scale = half_towards(parts.abs().amax(-1) / LARGEST[mode], up=True)
    step = torch.where(scale > 0, scale, 1.0).float().unsqueeze(-1)
    steps = torch.nan_to_num(parts / step).flatten(-2)
    if mode == "fp8_e4m3fn":
        return steps.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale
    codes = steps.round().clamp(-LARGEST[mode] - (mode == "int4"), LARGEST[mode]).to(torch.int8)
    if mode == "int8":
        return codes.view(torch.uint8), scale
    nibbles = codes.view(torch.uint8) & 15
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4, scale


def dequantise_latent(codes: torch.Tensor, scale: torch.Tensor, mode: str) -> torch.Tensor:
    """Inverse of `quantise_latent`: `[..., R] float32`."""
    if mode == "fp8_e4m3fn":
        values = codes.view(torch.float8_e4m3fn).float()
    elif mode == "int8":
        values = codes.view(torch.int8).float()
    else:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8)
        values = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    return (values.view(*scale.shape, -1) * scale.float().unsqueeze(-1)).flatten(-2)
