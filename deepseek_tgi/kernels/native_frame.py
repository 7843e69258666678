"""`Frame` as the C++ library takes it, and the table of rotations in the order in which attention reads it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.frame import Frame
from deepseek_tgi.kernels.library import FrameStruct

PANEL = 64
"""Positions that attention takes at a time (`native/attention_tiles.h`)."""


@dataclass(frozen=True, slots=True)
class NativeFrame:
    """The C struct, its address and what it points to; lives as long as the frame it was made from."""

    struct: FrameStruct
    address: int
    pairs: torch.Tensor | None


def native_frame(frame: Frame, rotary: int) -> NativeFrame:
    """The struct of a layer's frame, made once for each frame."""
    if not frame.native:
        pairs = None if frame.centre is None else _pairs(frame.centre, rotary // 2)
        addresses = [None if x is None else x.data_ptr() for x in (frame.centre, frame.aim, frame.weight, pairs)]
        struct = FrameStruct(
            *addresses, 0 if pairs is None else pairs.shape[1], frame.k_scale or 0.0, frame.v_scale or 0.0
        )
        frame.native.append(NativeFrame(struct, ctypes.addressof(struct), pairs))
    made: NativeFrame = frame.native[0]
    return made


def _pairs(centre: torch.Tensor, half: int) -> torch.Tensor:
    """`[G, 1 + R/2] int32`: how many pairs of each head are not zero, then which."""
    used = (centre[:, :half] != 0) | (centre[:, half : 2 * half] != 0)
    pairs = torch.zeros(centre.shape[0], 1 + half, dtype=torch.int32)
    for head, row in enumerate(used):
        where = row.nonzero().squeeze(1)
        pairs[head, 0] = len(where)
        pairs[head, 1 : 1 + len(where)] = where
    return pairs


class TurnTable:
    """Owner of the last table of cosines in panel order; a model has one table, which grows now and then."""

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None
        self._panels = torch.empty(0)

    def address(self, cos_sin: torch.Tensor) -> int:
        """Where `[ceil(P / 64), R, 64] float32` of `cos_sin [P, R]` lies."""
        if self._source is not cos_sin:
            rows, rotary = cos_sin.shape
            padded = torch.nn.functional.pad(cos_sin, (0, 0, 0, -rows % PANEL))
            self._panels = padded.view(-1, PANEL, rotary).transpose(1, 2).contiguous()
            self._source = cos_sin
        return self._panels.data_ptr()
