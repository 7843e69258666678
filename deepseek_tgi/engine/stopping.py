"""When a request ends: its length, an end token, a stop sequence, in this order."""

from __future__ import annotations

from deepseek_tgi.core import FinishReason, StopRule


class StopState:
    """One request's progress towards its end.

    A stop sequence counts wherever it appears in the text, also if it ends inside a token; the text is not cut.
    """

    __slots__ = ("_eos_token_ids", "_longest", "_rule", "_tail", "count")

    def __init__(self, rule: StopRule, eos_token_ids: frozenset[int]) -> None:
        self._rule = rule
        self._eos_token_ids = frozenset() if rule.ignore_eos else eos_token_ids
        self._longest = max((len(s) for s in rule.stop_sequences), default=0)
        self._tail = ""
        self.count = 0

    @property
    def at_last_token(self) -> bool:
        """True if the next token ends the request whatever it is."""
        return self.count + 1 >= self._rule.max_new_tokens

    def advance(self, token_id: int, piece: str) -> FinishReason | None:
        """Count a token whose text is `piece`; the reason to end, None to go on."""
        self.count += 1
        if self.count >= self._rule.max_new_tokens:
            return FinishReason.LENGTH
        if token_id in self._eos_token_ids:
            return FinishReason.EOS_TOKEN
        if self._longest and piece:
            text = self._tail + piece
            if any(stop in text for stop in self._rule.stop_sequences):
                return FinishReason.STOP_SEQUENCE
            # Only this much of the past can still be the beginning of a stop sequence.
            self._tail = text[max(0, len(text) - self._longest + 1) :]
        return None
