"""What the cached keys and values of a layer are measured against: constants that low-bit formats lean on.

A key is `R_p x`, R_p the rotation of its position p. Its `centre` is a constant of the head before rotation: the bias
of `k_proj`, or the mean over some text. Low-bit formats store `R_p x - R_p centre`, and what reads a key adds
`R_p centre` back, made from the same table of cosines: exact, whatever the bias, or (decode steps on a GPU) as exact as
float32 holds the angle. At INT4 a key says by its mark whether that was done (`int4_format`): the keys of first tokens,
which attention rests on, are often not near the centre at all.
`aim` and `weight` shape INT4's errors. A frame means nothing to float formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.pages import LayerPages

MAX_HEAD = 512
"""Elements of the largest key in a frame, and of the largest INT4 key or value."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The constants of one layer. Shapes: `centre`, `aim` `[G, D] float32`, `weight [G] float32`.

    `aim` is the direction, of length 1, in which queries see a key before rotation, and `weight` how much more an error
    counts along it than across. `k_scale`, `v_scale` are FP8 scales that came with the checkpoint, as float16 values.
    """

    centre: torch.Tensor | None = None
    aim: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    native: list[Any] = field(default_factory=list, compare=False, repr=False)
    """What the native kernels derived from it, once."""


@dataclass(frozen=True, slots=True)
class PlacedFrame:
    """A frame with what turns it: `positions [T] int32` of tokens to write, `cos_sin [P, R] float32` as in `rope`."""

    frame: Frame
    positions: torch.Tensor
    cos_sin: torch.Tensor

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`R_p x` for the heads `x [G, D]` at each of `positions [n]`: `[n, G, D]`, rounded as `rope` rounds."""
        half = self.cos_sin.shape[1] // 2
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, -1)  # [n, 1, R/2]
        a, b = x[:, :half], x[:, half : 2 * half]
        rest = x[:, 2 * half :].expand(len(positions), -1, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def check_frame(op: str, pages: LayerPages, placed: PlacedFrame) -> None:
    """Raise `GenerationError` for a frame of another layer's shape, or a table of cosines that does not fit."""
    heads, width, cos_sin = pages.num_heads, pages.k_dim, placed.cos_sin
    if width > MAX_HEAD:
        refuse(f"{op}: got keys of {width} elements in a frame, expected at most {MAX_HEAD}")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or cos_sin.shape[1] > width:
        refuse(f"{op}: got {describe('cos_sin', cos_sin)}, expected [positions, at most {width}] float32")
    frame = placed.frame
    for name, x, shape in (
        ("centre", frame.centre, (heads, width)),
        ("aim", frame.aim, (heads, width)),
        ("weight", frame.weight, (heads,)),
    ):
        if x is not None and not (x.dtype == torch.float32 and tuple(x.shape) == shape and x.is_contiguous()):
            refuse(f"{op}: got {describe(name, x)}, expected {list(shape)} float32, dense")
