"""Which token history each cache slot holds, so that a claimed prefix is believed only if it is really stored.

TGI's router also remembers prefixes of prompts that were never computed (a step that failed, an admission that was put
back). Choice: one 64-bit number a slot, the sum of `hash(secret, token, position)` over the history up to and
including it; a prefix of c tokens is verified with one cumulative sum. Prevents: attention over somebody else's or
nobody's keys. Rejected: keeping the ids of every slot's history, which is quadratic in memory.
The secret makes it infeasible to choose a prompt that sums to another one's number.
"""

from __future__ import annotations

import secrets

import torch

from deepseek_tgi.logits.hash64 import finish_, mix, signed, spread

UNWRITTEN = 0


class PrefixGuard:
    """Owner of the slot history numbers `[num_slots] int64`; used by the engine's thread alone."""

    def __init__(self, num_slots: int, device: str = "cpu", secret: int | None = None) -> None:
        key = secrets.randbits(128) if secret is None else secret
        self._token_key = signed(mix(key))
        self._position_key = signed(mix(key >> 64) | 1)
        self._written = torch.full((num_slots,), UNWRITTEN, dtype=torch.int64, device=device)

    def numbers(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What each of the tokens `ids [T] int64` at `positions [T]` adds to its history's number, `[T] int64`."""
        place = finish_(spread(positions.long()) ^ self._position_key)
        return finish_(spread(ids) + place ^ self._token_key)

    def verified(self, ids: torch.Tensor, slots: torch.Tensor) -> int:
        """How many of the first tokens `ids [c]` are stored, with exactly this history, at `slots [c]`."""
        if not len(ids):
            return 0
        positions = torch.arange(len(ids), device=ids.device)
        expected = self.numbers(ids, positions).cumsum(0)
        wrong = (self._written[slots] != expected).nonzero()
        return int(wrong[0]) if len(wrong) else len(ids)

    def history(self, slots: torch.Tensor) -> torch.Tensor:
        """Numbers of the histories that end at `slots [n]`."""
        return self._written[slots]

    def forget(self, slots: torch.Tensor) -> None:
        """Before `slots` are written: until `remember` they hold nothing that may be claimed."""
        self._written[slots] = UNWRITTEN

    def remember(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        """After `slots [T]` were written: they hold the histories of `numbers [T]`."""
        self._written[slots] = numbers
