"""What `cuda/sources/paged_decode.cu` adds the centre of keys with, made once a frame and a table.

A token at `16 n + i` is turned as one at i and then by what turns one at `16 n`: true where angles are in proportion to
positions, as every scaling has them but `dynamic` beyond the original length (`TurnTables.of` says None there). Angles
of the table are float32 products, so centres come back with what that leaves out of them: 2^-24 of the angle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.pages import LayerPages

TILE = 16
"""Tokens that share a start."""
_BATCH = {"int4": 2}
"""Steps of four pairs that the kernel takes together: 4 where nothing is said."""
_SMALLEST = 1e-37
_CHECKED = 4096
"""Rows of a table that are looked at together: memory is short once there is a cache."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What the kernel adds keys' centre with; see `TurnTables`."""

    centre: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    heads: torch.Tensor | None = None
    steps: int = 0
    rotary: int = 0


NO_TURNS = Turns()


@dataclass(frozen=True, slots=True)
class _Angles:
    """Of one table of cosines: `starts [P / 16, R/2 + 1, 2] float32`, cosine and sine of every sixteenth position, and
    `rows [16, R/2 + 1, 4] float16`, those of the first sixteen and what rounding left of them. The last pair is 1
    and 0, for what does not turn. `even`: whether the one turned by the other is the table again.
    """

    starts: torch.Tensor
    rows: torch.Tensor
    even: bool


class TurnTables:
    """Tables of cosines and sines, and what each head of a frame takes of them: made once and kept.

    `heads [G, bytes]`: the rows of the head's pairs as the kernel multiplies them, four pairs a step, tokens g and
    g + 8 of lane 4 g + t; its pairs of the centre, divided by a power of two; their indices, -1 behind the last; that
    power.
    """

    def __init__(self) -> None:
        self._angles: list[tuple[torch.Tensor, _Angles]] = []
        self._turns: dict[int, tuple[Frame, torch.Tensor, Turns | None]] = {}

    def of(self, placed: PlacedFrame, pages: LayerPages) -> Turns | None:
        """Those of a frame with a centre; None if angles are not in proportion. Asks the device the first time."""
        frame, cos_sin = placed.frame, placed.cos_sin
        kept = self._turns.get(id(frame))
        if kept is None or kept[0] is not frame or kept[1] is not cos_sin:
            kept = self._turns[id(frame)] = (frame, cos_sin, self._make(frame, cos_sin, pages))
        return kept[2]

    def _make(self, frame: Frame, cos_sin: torch.Tensor, pages: LayerPages) -> Turns | None:
        assert frame.centre is not None, "only frames with a centre turn"
        angles = self._of_table(cos_sin)
        if not angles.even:
            return None
        rotary = cos_sin.shape[1]
        pairs = _pairs(frame.centre, rotary, still=pages.mode == "int4", unit=4 * _BATCH.get(pages.mode, 4))
        heads = _heads(frame.centre, pairs, angles.rows, rotary)
        return Turns(frame.centre, angles.starts, heads, pairs.shape[1] // 4, rotary)

    def _of_table(self, cos_sin: torch.Tensor) -> _Angles:
        for source, angles in self._angles:
            if source is cos_sin:
                return angles
        made = _angles(cos_sin)
        self._angles.append((cos_sin, made))
        return made


def _angles(cos_sin: torch.Tensor) -> _Angles:
    size = cos_sin[:1, : cos_sin.shape[1] // 2].double()  # yarn's factor
    ends = _complex(cos_sin[:TILE]) / size
    ends = torch.nn.functional.pad(ends, (0, 0, 0, TILE - len(ends)))
    still = torch.tensor([1.0, 0.0], device=cos_sin.device)
    wide = torch.cat((torch.view_as_real(ends), still.expand(TILE, 1, 2)), 1).float()
    high = wide.half()
    rows = torch.cat((high, (wide - high.float()).half()), 2)
    starts = torch.stack(cos_sin[::TILE].chunk(2, 1), 2)
    starts = torch.cat((starts, still.expand(len(starts), 1, 2)), 1)
    return _Angles(starts.contiguous(), rows.contiguous(), _even(cos_sin, ends, size))


def _even(cos_sin: torch.Tensor, ends: torch.Tensor, size: torch.Tensor) -> bool:
    """Whether every row is that of its start, turned by its place: all but for what float32 leaves out of angles."""
    count = len(cos_sin)
    limit = size * (count * 2.0**-22 + 2.0**-20)
    off = torch.zeros((), dtype=torch.bool, device=cos_sin.device)
    for first in range(0, count, _CHECKED):
        part = cos_sin[first : first + _CHECKED]
        again = (_complex(part[::TILE])[:, None] * ends).flatten(0, 1)[: len(part)]
        off |= ((again - _complex(part)).abs() > limit).any()
    return not bool(off)


def _complex(cos_sin: torch.Tensor) -> torch.Tensor:
    return torch.complex(*cos_sin.double().chunk(2, 1))


def _heads(centre: torch.Tensor, pairs: torch.Tensor, rows: torch.Tensor, rotary: int) -> torch.Tensor:
    """See `TurnTables`."""
    heads, half = len(centre), rotary // 2
    present, places = pairs >= 0, pairs.clamp(min=0).long()
    _, exponent = torch.frexp(centre.abs().amax(1, keepdim=True).clamp(min=_SMALLEST))
    grow = torch.exp2((exponent - 1).float())  # [G, 1]
    turning = torch.stack((centre[:, :half], centre[:, half:rotary]), 2)
    turning = torch.cat((turning, torch.tensor([1.0, 0.0], device=centre.device).expand(heads, 1, 2)), 1)
    own = turning.gather(1, places[:, :, None].expand(-1, -1, 2)) / grow[:, :, None] * present[:, :, None]
    words = rows.view(torch.int32)[:, places.flatten()].view(TILE, heads, -1, 4, 2)  # token, head, step, t, word
    words = words * present.view(1, heads, -1, 4, 1)
    table = words.view(2, TILE // 2, heads, -1, 4, 2).permute(2, 3, 1, 4, 5, 0)  # head, step, g, t, word, half
    ending = torch.zeros(heads, 4, device=centre.device)
    ending[:, :1] = grow
    parts = (table, own.float(), pairs, ending)
    return torch.cat([x.contiguous().view(heads, -1).view(torch.uint8) for x in parts], 1).contiguous()


def _pairs(centre: torch.Tensor, rotary: int, *, still: bool, unit: int) -> torch.Tensor:
    """Indices of the pairs of each head that are not zero, padded to whole `unit`s; with `still`, one for all that does
    not turn.
    """
    half = rotary // 2
    first, second, rest = centre[:, :half], centre[:, half:rotary], centre[:, rotary:]
    present = (first != 0) | (second != 0)
    if still:
        present = torch.cat((present, (rest != 0).any(1, keepdim=True)), 1)
    found = [row.nonzero().flatten().tolist() for row in present]
    width = max(1, -(-max(map(len, found)) // unit)) * unit
    padded = [row + [-1] * (width - len(row)) for row in found]
    return torch.tensor(padded, dtype=torch.int32, device=centre.device)
