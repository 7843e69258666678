"""Memory that latent attention keeps from step to step, as arithmetic on its sizes. No torch here.

The native op (native/latent_absorbed.cpp, native/latent_expanded.cpp) has memory of its own, grown to the largest step
seen and counted there (native/scratch.h), which tests compare; these are upper bounds of it, the same for a plan made
from a config and for a loaded model. Units: floats.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOM_FLOATS = 1 << 24
"""Keys, values and sums of the expanded form at once, unless one head alone needs more (`ROOM_FLOATS` there)."""
QUERY_FLOATS = 1 << 23
"""Queries in latent space at once, unless one token alone needs more (`QUERY_FLOATS`)."""
PARTIAL_FLOATS = 1 << 23
"""Results of segments that wait to be merged, unless one alone is more (`PARTIAL_FLOATS`)."""
_SEGMENT, _PANEL, _UP_TILE, _LANES = 256, 64, 64, 16
_UNIT_ROWS, _EXPANDED_TOKENS = 128, 96
_ALIGNED = 12 * _LANES  # what a dozen buffers lose to alignment


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Widths of one layer's attention; `context` is the longest one that a request may have."""

    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    context: int

    def native_floats(self, num_tokens: int, num_threads: int) -> int:
        """Of the native op, in both forms, for a step of so many tokens: a step may hold requests of either."""
        return self._expanded(num_tokens) + self._absorbed(num_tokens, num_threads) + num_threads * self._own()

    def _segments(self) -> int:
        return -(-self.context // _SEGMENT)

    def _expanded(self, num_tokens: int) -> int:
        if num_tokens < 2:
            return 0
        v_pad = _up(self.v_dim)
        segment = _SEGMENT * (self.nope_dim + self.rope_dim + v_pad)
        sums = num_tokens * (v_pad + 4)
        return min(max(ROOM_FLOATS, segment + sums), self.num_heads * (self._segments() * segment + sums))

    def _absorbed(self, num_tokens: int, num_threads: int) -> int:
        one = self.num_heads * self.rank
        queries = min(max(QUERY_FLOATS, one), num_tokens * one)
        if num_threads < 2:
            return queries
        rows = min(_up(max(self.num_heads, _UNIT_ROWS)), _up(num_tokens * self.num_heads))
        segment = rows * (self.rank + 2)
        return queries + segment + min(max(PARTIAL_FLOATS, segment), self._segments() * segment)

    def _own(self) -> int:
        """One thread's: a unit of rows in latent space, and a tile of tokens over expanded keys."""
        pad, width = _up(max(self.num_heads, _UNIT_ROWS)), self.rank + _up(self.rope_dim) + _LANES
        unit = pad * (width + _PANEL + 2 * self.rank + 6) + _PANEL * width + _ALIGNED
        panel = 2 * _PANEL * width + _up(self.nope_dim) * (_UP_TILE + 1)
        tile = _EXPANDED_TOKENS * (_up(self.nope_dim + self.rope_dim) + _SEGMENT + _up(self.v_dim))
        return unit + max(panel, tile)


def _up(count: int) -> int:
    return -(-count // _LANES) * _LANES
