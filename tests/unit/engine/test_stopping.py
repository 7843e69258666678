"""Length before end token before stop text, wherever the stop text falls."""

from __future__ import annotations

import pytest

from deepseek_tgi.core import FinishReason, StopRule
from deepseek_tgi.engine.stopping import StopState

EOS = frozenset({1, 9})


def reasons(rule: StopRule, steps: list[tuple[int, str]]) -> list[FinishReason | None]:
    state = StopState(rule, EOS)
    return [state.advance(token_id, piece) for token_id, piece in steps]


def test_length_wins_over_end_token_and_stop_text() -> None:
    assert reasons(StopRule(2, ("b",)), [(5, "a"), (1, "b")]) == [None, FinishReason.LENGTH]


def test_end_token_wins_over_stop_text() -> None:
    assert reasons(StopRule(9, ("b",)), [(9, "b")]) == [FinishReason.EOS_TOKEN]


def test_every_listed_end_id_counts_unless_ignored() -> None:
    for token_id in EOS:
        assert reasons(StopRule(9), [(token_id, "")]) == [FinishReason.EOS_TOKEN]
        assert reasons(StopRule(9, ignore_eos=True), [(token_id, "")]) == [None]


@pytest.mark.parametrize(
    ("stops", "pieces", "ends_at"),
    [
        (("Pari",), [" Par", "is is", " x"], 1),
        (("abc",), ["xa", "b", "c", "d"], 2),
        (("later", "ear"), ["an ", "early", " later"], 1),
        (("x",), ["a", "", "x"], 2),
        (("\n\n",), ["a\n", "\nb"], 1),
        (("A" * 400,), ["A" * 150] * 4, 2),
        (("aab",), ["aa", "a", "b"], 2),
    ],
    ids=["inside a token", "three tokens", "earliest of two", "one character", "newlines", "long", "overlap"],
)
def test_stop_text_is_found(stops: tuple[str, ...], pieces: list[str], ends_at: int) -> None:
    got = reasons(StopRule(99, stops), [(5, piece) for piece in pieces])
    assert got.index(FinishReason.STOP_SEQUENCE) == ends_at


def test_a_stop_text_is_not_found_across_what_is_not_adjacent() -> None:
    assert reasons(StopRule(99, ("ab",)), [(5, "a"), (5, "x"), (5, "b")]) == [None] * 3
