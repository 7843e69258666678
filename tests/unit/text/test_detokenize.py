"""Streamed pieces join to the text and never show half a character."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizer_kinds

from deepseek_tgi.text.detokenize import MAX_PENDING_TOKENS, IncrementalDetokenizer
from deepseek_tgi.text.tokenizer import TextTokenizer

TEXT = "Hello the wörld 你好 😀👩‍👩‍👧 stop   two\n é end"


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> TextTokenizer:
    build: Callable[[Path], Path] = getattr(tokenizer_kinds, request.param)
    return TextTokenizer.from_folder(build(tmp_path))


def stream(tokenizer: TextTokenizer, prompt: list[int], output: list[int]) -> tuple[list[str], str]:
    ids = list(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, ids)
    pieces = []
    for token_id in output:
        ids.append(token_id)
        pieces.append(detokenizer.advance())
    return pieces, detokenizer.final_text()


def test_pieces_join_to_the_text_wherever_the_prompt_ends(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    full = tokenizer.decode(ids)
    for cut in range(1, len(ids) - 1):
        before = tokenizer.decode(ids[:cut])
        if before.endswith("\ufffd"):
            continue
        pieces, final = stream(tokenizer, ids[:cut], ids[cut:])
        assert "".join(pieces) == final == full[len(before) :], f"cut at {cut}"
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_short_prompts_stream_right(tokenizer: TextTokenizer, length: int) -> None:
    ids = tokenizer.encode("a b Hello", add_special_tokens=False)
    pieces, final = stream(tokenizer, ids[:length], ids[length:])
    assert "".join(pieces) == final == tokenizer.decode(ids)[len(tokenizer.decode(ids[:length])) :]


def test_a_character_split_over_tokens_appears_once_whole(tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode("Hello")
    output = tokenizer.encode("Hello😀")[len(prompt) :]
    assert len(output) == 4
    assert stream(tokenizer, prompt, output) == (["", "", "", "😀"], "😀")


def test_an_unfinished_last_character_reads_as_is(tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode("Hello")
    output = tokenizer.encode("Hello😀")[len(prompt) : -1]
    pieces, final = stream(tokenizer, prompt, output)
    assert pieces == ["", "", ""]
    assert set(final) == {"\ufffd"}


def test_a_window_that_opens_inside_a_character_does_not_spoil_the_next(tokenizer: TextTokenizer) -> None:
    # The prompt was cut from the left inside a character, so its first ids are stray bytes.
    prompt = tokenizer.encode("Hello😀")[-2:]
    output = tokenizer.encode("Hello wörld")
    joined = "".join(stream(tokenizer, prompt, output)[0])
    assert "wörld" in joined


def test_specials_stream_but_stay_out_of_the_final_text(tokenizer: TextTokenizer) -> None:
    prompt = tokenizer.encode("Hello")
    eos = tokenizer.eos_token_id
    assert eos is not None
    output = [*tokenizer.encode("Hello two")[len(prompt) :], eos]
    pieces, final = stream(tokenizer, prompt, output)
    assert "".join(pieces) == " two</s>"
    assert final == " two"


def test_endless_stray_bytes_are_shown_after_a_bounded_wait(tokenizer: TextTokenizer) -> None:
    stray = tokenizer.encode("Hello😀")[-1]
    pieces, _ = stream(tokenizer, tokenizer.encode("Hello"), [stray] * (3 * MAX_PENDING_TOKENS))
    assert "".join(pieces).count("\ufffd") >= 2 * MAX_PENDING_TOKENS
    good = tokenizer.encode("Hello two")[len(tokenizer.encode("Hello")) :]
    pieces, _ = stream(tokenizer, tokenizer.encode("Hello"), [stray] * 150 + good)
    assert "".join(pieces).endswith(" two")


def test_cost_of_a_token_does_not_grow_with_the_text(tokenizer: TextTokenizer) -> None:
    rng = random.Random(0)
    ids = tokenizer.encode("Hello")
    detokenizer = IncrementalDetokenizer(tokenizer, ids)

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(count):
                ids.append(rng.randrange(3, 250))
                detokenizer.advance()
            best = min(best, time.perf_counter() - start)
        return best

    early = seconds(200)
    for _ in range(20_000):
        ids.append(rng.randrange(3, 250))
        detokenizer.advance()
    assert seconds(200) < 10 * early
