"""Keys and values of one head to and from the number format of their pages; what all implementations in torch share."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.fp8_format import dequantise_fp8, quantise_fp8
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.int4_format import (
    Aim,
    dequantise_int4,
    fold,
    mark_of,
    quantise_rotated,
    rotate,
    rotation_size,
)
from deepseek_tgi.kernels.int8_format import HALF_MAX, dequantise_rows, quantise_rows
from deepseek_tgi.kernels.pages import LayerPages

Stored = tuple[torch.Tensor, torch.Tensor | None]
"""Rows as they lie in a page, and their scales."""


def stored_keys(pages: LayerPages, k: torch.Tensor, placed: PlacedFrame | None, positions: torch.Tensor) -> Stored:
    """Rotated keys `k [n, G, D] float32` of tokens at `positions [n]` as the pages hold them."""
    if pages.mode == "int4":
        return _int4_keys(k, placed, positions)
    if pages.quantised and placed is not None and placed.frame.centre is not None:
        k = k - placed.turned(placed.frame.centre, positions)
    return _stored(pages, k, None if placed is None else placed.frame.k_scale)


def stored_values(pages: LayerPages, v: torch.Tensor, placed: PlacedFrame | None) -> Stored:
    """Values `v [n, G, Dv] float32` as the pages hold them."""
    if pages.mode == "int4":
        return quantise_rotated(rotate(v.float().clamp(-HALF_MAX, HALF_MAX)))
    return _stored(pages, v, None if placed is None else placed.frame.v_scale)


def read_vectors(mode: str, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows `[..., W]` of pages in `mode` as float32 `[..., D]`; of keys, without their centre."""
    if scales is None:
        return rows.float()
    return {"int8": dequantise_rows, "fp8_e4m3fn": dequantise_fp8, "int4": dequantise_int4}[mode](rows, scales)


def read_keys(
    pages: LayerPages, rows: torch.Tensor, scales: torch.Tensor | None, placed: PlacedFrame | None, first: int = 0
) -> torch.Tensor:
    """Keys `[..., G, L, W]` of positions `first ..` as they were written, `[..., G, L, D] float32`."""
    k = read_vectors(pages.mode, rows, scales)
    if scales is None or placed is None or placed.frame.centre is None:
        return k
    positions = torch.arange(first, first + k.shape[-2], device=k.device)
    centre = placed.turned(placed.frame.centre, positions).transpose(0, 1)  # [G, L, D]
    return torch.where(mark_of(scales).unsqueeze(-1), k + centre, k) if pages.mode == "int4" else k + centre


def int4_error(k: torch.Tensor, placed: PlacedFrame, positions: torch.Tensor) -> torch.Tensor:
    """What INT4 in a frame changes rotated keys `k [n, G, D]` of tokens at `positions [n]` by."""
    codes, scales = _int4_keys(k, placed, positions)
    read = dequantise_int4(codes, scales)
    if placed.frame.centre is not None:
        centre = placed.turned(placed.frame.centre, positions)
        read = torch.where(mark_of(scales).unsqueeze(-1), read + centre, read)
    return read - k


def _stored(pages: LayerPages, x: torch.Tensor, scale: float | None) -> Stored:
    if pages.mode == "int8":
        return quantise_rows(x)
    if pages.mode == "fp8_e4m3fn":
        return quantise_fp8(x, scale)
    if pages.mode == "float16":
        x = x.clamp(-HALF_MAX, HALF_MAX)
    return x.to(pages.k.dtype), None


def _int4_keys(
    k: torch.Tensor, placed: PlacedFrame | None, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    y = rotate(k.float().clamp(-HALF_MAX, HALF_MAX))
    mark = torch.zeros_like(y[..., :1], dtype=torch.bool)
    aim = None
    if placed is not None and placed.frame.centre is not None:
        off = y - rotate(placed.turned(placed.frame.centre, positions))
        mark = fold(off.square()) <= fold(y.square())
        y = torch.where(mark, off, y)
    if placed is not None and placed.frame.aim is not None and placed.frame.weight is not None:
        u = rotate(placed.turned(placed.frame.aim, positions))
        size = rotation_size(k.shape[-1])
        longer = size / 4.0 ** ((size.bit_length() - 1) // 2)  # what rotating does to squared lengths: 1 or 2
        aim = Aim(u, (placed.frame.weight / longer).unsqueeze(-1))
    return quantise_rotated(y, mark, aim)
