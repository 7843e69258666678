"""Constrained output: which tokens may come next so that the text matches a regular expression or a JSON schema.

llguidance walks the grammar; this module asks it for masks, keeps compiled grammars and turns its messages into
errors of one request. A request's state is its own object and so survives any change of the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import llguidance
import torch

from deepseek_tgi.core import GrammarType
from deepseek_tgi.errors import RequestError
from deepseek_tgi.text.tokenizer import TextTokenizer

CACHED_GRAMMARS = 32
SHOWN_CHARACTERS = 80
SHOWN_REASON_CHARACTERS = 200
"""llguidance repeats the whole grammar in its messages."""
NO_WAY_ON = "NoExtensionBias"
"""llguidance's word for a grammar that no text can go on with: no reason beyond that."""
JSON_WHITESPACE = "[ ]?"
"""At most one space between JSON tokens, as in the expressions TGI's router makes of schemas; without a bound a model
may write line breaks until its length is up."""


class Constraint(Protocol):
    """What the pipeline asks of a grammar engine, once a token."""

    def allowed(self, vocab_size: int) -> torch.Tensor | None:
        """Ids that may come next, `[V] bool`; None if anything may; all false if the text cannot go on."""

    def accept(self, token_id: int) -> None:
        """Go on with the chosen token."""

    def fault(self) -> str:
        """Why nothing may come next; empty if the grammar simply ends here."""


class MatcherConstraint:
    """A grammar's place in one request's text. Once the text is complete only end-of-sequence is allowed."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> torch.Tensor | None:
        """See `Constraint`."""
        known = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) != 0
        if self._matcher.is_error():
            # A matcher that gives up (limits, a grammar of no text) allows the end, as if the text were complete.
            return torch.zeros(vocab_size, dtype=torch.bool)
        if len(known) >= vocab_size:
            return known[:vocab_size]
        return torch.nn.functional.pad(known, (0, vocab_size - len(known)))

    def accept(self, token_id: int) -> None:
        """See `Constraint`."""
        self._matcher.consume_token(token_id)

    def fault(self) -> str:
        """See `Constraint`."""
        reason = _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""
        return "" if reason == NO_WAY_ON else reason


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the last `CACHED_GRAMMARS`; used by the engine's thread alone.

    The tokenizer's own table takes about a second at 128k tokens, so it is made by the first grammar.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_token_ids = sorted(eos_token_ids)
        self._table: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[GrammarType, str], llguidance.LLMatcher] = OrderedDict()

    def constraint(self, kind: GrammarType, grammar: str) -> MatcherConstraint | None:
        """A fresh state at the grammar's start, None for no grammar.

        Raises: `RequestError` with the reason if the grammar does not compile.
        """
        if kind is GrammarType.NONE or not grammar:
            return None
        key = (kind, grammar)
        if key not in self._compiled:
            self._compiled[key] = self._compile(kind, grammar)
        self._compiled.move_to_end(key)
        if len(self._compiled) > CACHED_GRAMMARS:
            self._compiled.popitem(last=False)
        return MatcherConstraint(self._compiled[key].deep_copy())

    def _compile(self, kind: GrammarType, grammar: str) -> llguidance.LLMatcher:
        try:
            if kind is GrammarType.JSON:
                source = llguidance.LLMatcher.grammar_from_json_schema(
                    grammar, overrides={"whitespace_pattern": JSON_WHITESPACE}
                )
            else:
                source = llguidance.LLMatcher.grammar_from_regex(grammar)
        except ValueError as error:
            raise _refusal(kind, grammar, str(error)) from error
        matcher = llguidance.LLMatcher(self._tokens(), source, log_level=0)
        if matcher.is_error():
            raise _refusal(kind, grammar, matcher.get_error())
        return matcher

    def _tokens(self) -> llguidance.LLTokenizer:
        if self._table is None:
            eos = self._eos_token_ids or None
            self._table = llguidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=eos)
        return self._table


def _refusal(kind: GrammarType, grammar: str, reason: str) -> RequestError:
    shown = grammar if len(grammar) <= SHOWN_CHARACTERS else grammar[:SHOWN_CHARACTERS] + "..."
    expected = "a JSON schema" if kind is GrammarType.JSON else "a regular expression without look-around"
    return RequestError(f"grammar: cannot use {shown!r}, expected {expected}: {_cut(' '.join(reason.split()))}")


def _first_line(reason: str) -> str:
    return _cut(reason.partition("\n")[0])


def _cut(reason: str) -> str:
    return reason if len(reason) <= SHOWN_REASON_CHARACTERS else reason[:SHOWN_REASON_CHARACTERS] + "..."
