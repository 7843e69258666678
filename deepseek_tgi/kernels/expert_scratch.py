"""Scratch memory that the experts of a layer take, as arithmetic on their sizes. No torch here.

The native op (native/moe.cpp) cuts its scratch as it goes; these are upper bounds of what it takes, the same for a plan
made from a config and for the weights once packed. Units: floats, 4 bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass

WAVE_FLOATS = 8 << 20
"""What the experts at work share (`WAVE_BYTES` of native/moe.cpp), unless one alone needs more."""
_ALIGNED = 16
_EXPERT_FLOATS = 64  # bookkeeping of one expert at work
_CALL_FLOATS = 1024  # of a call, alignment included


def digit_floats(width: int) -> int:
    """A row of so many inputs as digits of 31 bits with scales and sums, in groups of 16 or more.

    A byte pair for each of two digits is a float; a block of 16 has three words besides; chunks are padded by a
    hundredth; a row alone may be aligned five times.
    """
    return width + width // 4 + 5 * _ALIGNED


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """`num_experts` of width `inner` over `hidden`, and one shared by all tokens of width `shared` (0: none).

    `hidden_digits` and `inner_digits` bound a row of an expert's inputs as digits, `shared_digits` the same of the
    shared expert; `layouts` counts the ways in which experts want the rows of x.
    """

    num_experts: int
    hidden: int
    inner: int
    shared: int
    layouts: int
    hidden_digits: int
    inner_digits: int
    shared_digits: int

    @classmethod
    def usual(cls, num_experts: int, hidden: int, inner: int, shared: int) -> ExpertSizes:
        """Experts quantised in groups of 16 or more, all alike, or not quantised."""
        digits = (digit_floats(hidden), digit_floats(inner), digit_floats(shared))
        return cls(num_experts, hidden, inner, shared, 1, *digits)

    def native_floats(self, num_tokens: int, top_k: int) -> int:
        """Of the native op: of all choices together, or of a full wave, or of one expert that every token chose."""
        tokens = num_tokens
        routed = _row(self.hidden, self.inner, max(self.hidden_digits, self.inner_digits))
        shared = _row(self.hidden, self.shared, max(self.hidden_digits, self.shared_digits)) if self.shared else 0
        together = tokens * (top_k * routed + shared)
        wave = min(together, max(WAVE_FLOATS, tokens * max(routed, shared)))
        pairs = tokens * (top_k + 1)
        kept = 5 * pairs + 2 * self.num_experts + _EXPERT_FLOATS * min(pairs, self.num_experts + 1) + _CALL_FLOATS
        return kept + self.layouts * (tokens * self.hidden_digits + _CALL_FLOATS) + wave

    def grouped_floats(self, num_tokens: int) -> int:
        """Of the op made of linear ops: x, gate and up, and the activation of one expert that every token chose."""
        return num_tokens * (self.hidden + 3 * max(self.inner, self.shared))


def _row(hidden: int, inner: int, digits: int) -> int:
    """A token's row in one expert: its input as digits, and the wider of its two results."""
    return digits + max(2 * inner, hidden) + _ALIGNED
