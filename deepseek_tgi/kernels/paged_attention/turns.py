"""What `cuda/sources/paged_decode.cu` adds the centre of keys with, made once a frame and a table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.pages import LayerPages


@dataclass(frozen=True, slots=True)
class Turns:
    """What the kernel adds keys' centre with; see `TurnTables`."""

    centre: torch.Tensor | None = None
    table: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    steps: int = 0
    rotary: int = 0


NO_TURNS = Turns()


class TurnTables:
    """Tables of cosines and sines, and the pairs of elements that a centre has: each made once and kept.

    `table [P, R/2 + 1, 4] float16` is cos and sin of each pair, then what rounding left of them; the last pair is 1 and
    0, for what does not turn. `pairs [G, 4 n] int32` has -1 behind a head's last.
    """

    def __init__(self) -> None:
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turns: dict[int, tuple[Frame, Turns]] = {}

    def of(self, placed: PlacedFrame, pages: LayerPages) -> Turns:
        """Those of a frame with a centre. Asks the device the first time."""
        frame, cos_sin = placed.frame, placed.cos_sin
        kept = self._turns.get(id(frame))
        if kept is None or kept[0] is not frame or kept[1].rotary != cos_sin.shape[1]:
            assert frame.centre is not None, "only frames with a centre turn"
            pairs = _pairs(frame.centre, cos_sin.shape[1], still=pages.mode == "int4")
            kept = (frame, Turns(frame.centre, None, pairs, pairs.shape[1] // 4, cos_sin.shape[1]))
            self._turns[id(frame)] = kept
        return replace(kept[1], table=self._table(cos_sin))

    def _table(self, cos_sin: torch.Tensor) -> torch.Tensor:
        for source, table in self._tables:
            if source is cos_sin:
                return table
        still = torch.tensor([1.0, 0.0], device=cos_sin.device).expand(len(cos_sin), 1, 2)
        wide = torch.cat((torch.stack(cos_sin.chunk(2, 1), 2), still), 1)  # [P, R/2 + 1, 2]
        high = wide.half()
        table = torch.cat((high, (wide - high.float()).half()), 2).contiguous()
        self._tables.append((cos_sin, table))
        return table


def _pairs(centre: torch.Tensor, rotary: int, *, still: bool) -> torch.Tensor:
    """Indices of the pairs of each head that are not zero, padded; with `still`, one for all that does not turn."""
    half = rotary // 2
    first, second, rest = centre[:, :half], centre[:, half:rotary], centre[:, rotary:]
    present = (first != 0) | (second != 0)
    if still:
        present = torch.cat((present, (rest != 0).any(1, keepdim=True)), 1)
    found = [row.nonzero().flatten().tolist() for row in present]
    width = max(1, -(-max(map(len, found)) // 4)) * 4
    padded = [row + [-1] * (width - len(row)) for row in found]
    return torch.tensor(padded, dtype=torch.int32, device=centre.device)
