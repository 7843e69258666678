"""Token ids to text pieces, one token at a time, whole characters only.

A token may hold part of a character, or change how its neighbours read (leading spaces). So a piece is the difference
between two decodes of a short window: the tokens already shown, and those with the new ones behind them. The text of
a whole generation is one more decode at its end.
"""

from __future__ import annotations

from deepseek_tgi.text.tokenizer import TextTokenizer

CONTEXT_TOKENS = 5
"""Prompt tokens read before the first generated one, so that it is spaced as in running text."""
MAX_PENDING_TOKENS = 64
"""A run without a whole character this long is noise: it is shown as it reads, so that a window stays short."""
CHARACTER_TOKENS = 4
"""A character is at most four bytes, hence at most four tokens."""
REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Pieces of one request. `ids` is the caller's growing list of prompt and output ids; only the caller appends."""

    __slots__ = ("_ids", "_prefix", "_prompt_length", "_read", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._prompt_length = len(ids)
        self._prefix = _clean_start(tokenizer, ids, len(ids) - CONTEXT_TOKENS)
        self._read = len(ids)

    def advance(self) -> str:
        """Text that became whole with the ids appended since the last call; "" while a character is unfinished."""
        text = self._piece(len(self._ids))
        if text and not text.endswith(REPLACEMENT):
            self._show(len(self._ids))
            return text
        if len(self._ids) - self._read <= MAX_PENDING_TOKENS:
            return ""
        stop = len(self._ids) - CHARACTER_TOKENS
        text = self._piece(stop)
        self._show(stop)
        return text

    def final_text(self) -> str:
        """Text of everything generated, specials left out; an unfinished last character reads as U+FFFD."""
        ids, length = self._ids, self._prompt_length
        start = _clean_start(self._tokenizer, ids[:length], length - 1)
        before = self._tokenizer.decode(ids[start:length], skip_special_tokens=True)
        return self._tokenizer.decode(ids[start:], skip_special_tokens=True)[len(before) :]

    def _piece(self, stop: int) -> str:
        shown = self._ids[self._prefix : self._read]
        tokenizer = self._tokenizer
        before = tokenizer.token_text(shown[0]) if len(shown) == 1 else tokenizer.decode(shown)
        return tokenizer.decode(self._ids[self._prefix : stop])[len(before) :]

    def _show(self, stop: int) -> None:
        self._prefix, self._read = self._read, stop


def _clean_start(tokenizer: TextTokenizer, ids: list[int], start: int) -> int:
    """The nearest place at or before `start` from which `ids` do not begin inside a character."""
    start = max(start, 0)
    for candidate in range(start, max(start - CHARACTER_TOKENS, -1), -1):
        if not tokenizer.decode(ids[candidate:]).startswith(REPLACEMENT):
            return candidate
    return start
