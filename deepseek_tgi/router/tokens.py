"""Tokens as the API shows them, read from the wire's parallel lists."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.numbers import shortest

FINISH_REASONS = {
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_EOS_TOKEN: "eos_token",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
}


class Token(NamedTuple):
    """A generated or alternative token; `logprob` prints in its shortest 32-bit form, None if it is not finite."""

    id: int
    text: str
    logprob: float | None
    special: bool


class Ending(NamedTuple):
    """How a generation ended; `text` is the whole output."""

    text: str
    generated_tokens: int
    finish_reason: str
    seed: int | None


class TokenEvent(NamedTuple):
    """One token and, with the last one, the ending."""

    token: Token
    top_tokens: list[Token]
    ending: Ending | None


def tokens_of(tokens: pb.Tokens) -> list[Token]:
    """The wire's parallel lists as tokens; a missing `is_special` (prompt tokens) counts as false."""
    flags: Iterable[bool] = tokens.is_special or repeat(False)
    return [
        Token(token_id, text, shortest(logprob), flag)
        for token_id, logprob, text, flag in zip(tokens.ids, tokens.logprobs, tokens.texts, flags, strict=False)
    ]


def sorted_tops(tokens: pb.Tokens) -> list[Token]:
    """Alternatives, best first."""
    return sorted(
        tokens_of(tokens), key=lambda token: -float("inf") if token.logprob is None else token.logprob, reverse=True
    )
