"""Constrained text matches, ends, and errors stay with their request."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import tokenizer_kinds

from deepseek_tgi.core import GrammarType
from deepseek_tgi.errors import RequestError
from deepseek_tgi.logits.grammar import CACHED_GRAMMARS, GrammarCompiler, MatcherConstraint
from deepseek_tgi.text.tokenizer import TextTokenizer

SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"integer","maximum":99},"b":{"enum":["x","y"]}},'
    '"required":["a","b"],"additionalProperties":false}'
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path))


@pytest.fixture
def compiler(tokenizer: TextTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 5, tokenizer.eos_token_ids)


def walk(constraint: MatcherConstraint, tokenizer: TextTokenizer, seed: int) -> list[int]:
    """Random allowed tokens until end-of-sequence is one of them."""
    rng = random.Random(seed)
    ids: list[int] = []
    eos = tokenizer.eos_token_id
    assert eos is not None
    for _ in range(200):
        allowed = constraint.allowed(tokenizer.vocab_size + 5)
        assert allowed is not None
        choices = allowed.nonzero().flatten().tolist()
        assert choices
        ids.append(eos if eos in choices else rng.choice(choices))
        constraint.accept(ids[-1])
        if ids[-1] == eos:
            break
    return ids


@pytest.mark.parametrize("pattern", [r"[0-9]{2}-[a-c]+x", r"(the|stop) (one|two)!?", r"^ab$", r"你[好吗]"])
def test_only_matching_text_can_be_written(compiler: GrammarCompiler, tokenizer: TextTokenizer, pattern: str) -> None:
    for seed in range(5):
        constraint = compiler.constraint(GrammarType.REGEX, pattern)
        assert constraint is not None
        ids = walk(constraint, tokenizer, seed)
        assert re.fullmatch(pattern, tokenizer.decode(ids, skip_special_tokens=True))
        assert ids[-1] == tokenizer.eos_token_id


def test_a_schema_gives_matching_json(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    constraint = compiler.constraint(GrammarType.JSON, SCHEMA)
    assert constraint is not None
    value = json.loads(tokenizer.decode(walk(constraint, tokenizer, 1), skip_special_tokens=True))
    assert value["b"] in {"x", "y"}
    assert value["a"] <= 99


def test_json_has_no_room_for_endless_white_space(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    constraint = compiler.constraint(GrammarType.JSON, SCHEMA)
    assert constraint is not None
    for token_id in tokenizer.encode("{ "):
        constraint.accept(token_id)
    allowed = constraint.allowed(tokenizer.vocab_size)
    assert allowed is not None
    texts = [tokenizer.token_text(i) for i in allowed.nonzero().flatten().tolist()]
    assert texts
    assert not any(text[0].isspace() for text in texts)


def test_a_complete_text_allows_the_end_alone_and_stays_there(
    compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    constraint = compiler.constraint(GrammarType.REGEX, "ab")
    assert constraint is not None
    for token_id in tokenizer.encode("ab"):
        constraint.accept(token_id)
    for _ in range(3):
        allowed = constraint.allowed(tokenizer.vocab_size + 5)
        assert allowed is not None
        assert allowed.nonzero().flatten().tolist() == [tokenizer.eos_token_id]
        constraint.accept(tokenizer.eos_token_id or 0)


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [(r"[^\s\S]", ""), ("(a?){2000}a{2000}", "lexer error: too many expressions constructed")],
    ids=["matches-nothing", "beyond-limits"],
)
def test_a_matcher_that_gives_up_does_not_end_the_text_as_if_it_matched(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, pattern: str, fault: str
) -> None:
    constraint = compiler.constraint(GrammarType.REGEX, pattern)
    assert constraint is not None
    for _ in range(3):
        allowed = constraint.allowed(tokenizer.vocab_size + 5)
        assert allowed is not None
        if not allowed.any():
            assert constraint.fault() == fault
            return
        assert constraint.fault() == ""
        chosen = int(allowed.nonzero()[0])
        assert chosen != tokenizer.eos_token_id
        constraint.accept(chosen)
    pytest.fail("the matcher never gave up")


def test_a_refusal_does_not_repeat_a_long_grammar(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError) as refused:
        compiler.constraint(GrammarType.REGEX, "(" * 10_000)
    assert len(str(refused.value)) < 500


def test_masks_fit_the_models_vocabulary(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    constraint = compiler.constraint(GrammarType.REGEX, "a+")
    assert constraint is not None
    for width in (tokenizer.vocab_size - 3, tokenizer.vocab_size + 5, tokenizer.vocab_size + 100):
        allowed = constraint.allowed(width)
        assert allowed is not None
        assert len(allowed) == width
        assert not allowed[tokenizer.vocab_size :].any()


def test_requests_with_one_grammar_do_not_share_a_place(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    first, second = (compiler.constraint(GrammarType.REGEX, "ab") for _ in range(2))
    assert first is not None
    assert second is not None
    first.accept(tokenizer.encode("a")[0])
    allowed = second.allowed(tokenizer.vocab_size)
    assert allowed is not None
    assert allowed.nonzero().flatten().tolist() == tokenizer.encode("a")


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        (GrammarType.REGEX, "("),
        (GrammarType.REGEX, "(?=a)b"),
        (GrammarType.JSON, "{"),
        (GrammarType.JSON, "[]"),
        (GrammarType.JSON, '{"type":"nonsense"}'),
        (GrammarType.JSON, '{"$ref":"#/missing"}'),
    ],
)
def test_an_invalid_grammar_is_its_requests_error(compiler: GrammarCompiler, kind: GrammarType, grammar: str) -> None:
    with pytest.raises(RequestError, match="grammar: cannot use"):
        compiler.constraint(kind, grammar)
    assert compiler.constraint(GrammarType.REGEX, "a") is not None


def test_no_grammar_is_no_constraint(compiler: GrammarCompiler) -> None:
    assert compiler.constraint(GrammarType.NONE, "a+") is None
    assert compiler.constraint(GrammarType.REGEX, "") is None


def test_many_grammars_are_not_kept_for_ever(compiler: GrammarCompiler) -> None:
    for number in range(CACHED_GRAMMARS + 20):
        compiler.constraint(GrammarType.REGEX, f"a{{{number + 1}}}")
    assert len(compiler._compiled) == CACHED_GRAMMARS
