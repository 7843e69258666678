"""Vocabularies of GGUF files as `tokenizer.json`: hand-worked ids, `transformers`' reading, and the published rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from oracles import gguf as oracle
from tokenizers import Tokenizer

from deepseek_tgi.convert.gguf_file import GgufFile
from deepseek_tgi.convert.gguf_tokenizer import read_tokenizer
from deepseek_tgi.convert.pre_tokenizers import PRE_TOKENIZERS
from deepseek_tgi.errors import CheckpointError

Add = Callable[[gguf.GGUFWriter], list[str]]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ 1", "1 2", "12 3"]
PIECES = {
    "▁": -1.0, "t": -2.0, "h": -2.1, "e": -2.2, "n": -2.3, "th": -3.0, "he": -3.1, "▁t": -3.2, "the": -3.5,
    "▁th": -3.4, "▁the": -3.6, "hen": -2.9, "en": -4.0, "▁▁": -3.3, "▁he": -5.0,
}  # fmt: skip


def vocabulary(path: Path, add: Add) -> tuple[Path, list[str]]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    tokens = add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), dtype=np.float32))
    oracle.finish(writer)
    return path, tokens


def built(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    document, settings = read_tokenizer(GgufFile(path))
    return Tokenizer.from_str(json.dumps(document)), dict(settings)


def byte_level(pre: str) -> Add:
    return lambda writer: oracle.add_byte_level_vocabulary(writer, pre, MERGES)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["hello", "Ġw", "Ġ1", "2", "3", "<|note|>"]),
        ("smollm", ["hello", "Ġw", "Ġ", "1", "2", "3", "<|note|>"]),
        ("llama-bpe", ["hello", "Ġw", "Ġ", "123", "<|note|>"]),
        ("qwen2", ["hello", "Ġw", "Ġ", "1", "2", "3", "<|note|>"]),
        ("deepseek-r1-qwen", ["hello", "Ġw", "Ġ", "1", "2", "3", "<|note|>"]),
        ("deepseek-coder", ["hello", "Ġw", "Ġ", "1", "2", "3", "<|note|>"]),
        ("deepseek-llm", ["hello", "Ġw", "Ġ", "1", "2", "3", "<|note|>"]),
    ],
)
def test_each_named_rule_splits_as_its_models_do(pre: str, expected: list[str], tmp_path: Path) -> None:
    """Worked by hand: only gpt-2 keeps a space with digits, only llama-bpe keeps three digits together."""
    path, tokens = vocabulary(tmp_path / "x.gguf", byte_level(pre))
    tokenizer, _ = built(path)
    ids = tokenizer.encode("hello w 123<|note|>", add_special_tokens=False).ids
    assert [tokens[index] for index in ids] == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello w 123<|note|>"


def test_every_rule_is_held_to_a_hand_worked_split() -> None:
    marker = next(m for m in test_each_named_rule_splits_as_its_models_do.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in marker.args[1]} == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("text", ["", "a", "héllo wörld", "\t\n  \r\n", "日本語 text", "<s>hello</s>", "\u0000\ufffd"])
def test_byte_level_text_comes_back(text: str, tmp_path: Path) -> None:
    tokenizer, _ = built(vocabulary(tmp_path / "x.gguf", byte_level("gpt-2"))[0])
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_special_tokens_are_skipped_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer, settings = built(vocabulary(tmp_path / "x.gguf", byte_level("gpt-2"))[0])
    ids = tokenizer.encode("<s>hello<|note|></s>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<|note|>"
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, ["hello"]),
        ("llama-bpe", {}, ["<s>", "hello"]),
        ("llama-bpe", {"bos": False}, ["hello"]),
        ("gpt-2", {"bos": True, "eos": True}, ["<s>", "hello", "</s>"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    pre: str, flags: dict[str, bool], expected: list[str], tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> list[str]:
        if "bos" in flags:
            writer.add_add_bos_token(flags["bos"])
        if "eos" in flags:
            writer.add_add_eos_token(flags["eos"])
        return oracle.add_byte_level_vocabulary(writer, pre, MERGES)

    path, tokens = vocabulary(tmp_path / "x.gguf", add)
    tokenizer, settings = built(path)
    assert [tokens[index] for index in tokenizer.encode("hello").ids] == expected
    assert settings["add_bos_token"] == (expected[0] == "<s>")
    assert settings["add_eos_token"] == (expected[-1] == "</s>")


def sentencepiece(writer: gguf.GGUFWriter) -> list[str]:
    return oracle.add_sentencepiece_vocabulary(writer, PIECES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # th (-3.0) joins first, then ▁th (-3.4), then ▁the (-3.6).
        ("then", ["▁the", "n"]),
        # he (-3.1) joins first; of ▁he (-5.0) and hen (-2.9) the second is better, though it starts further right.
        ("hen", ["▁", "hen"]),
        ("he he", ["▁he", "▁he"]),
        ("x", ["▁", "<0x78>"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_joins_the_best_score_first(text: str, expected: list[str], tmp_path: Path) -> None:
    path, tokens = vocabulary(tmp_path / "x.gguf", sentencepiece)
    tokenizer, _ = built(path)
    ids = tokenizer.encode(text).ids
    assert [tokens[index] for index in ids] == ["<s>", *expected]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_equals_a_slow_restatement_of_its_algorithm(tmp_path: Path) -> None:
    """Join the neighbouring pair whose result scores best, leftmost first, until none is a piece."""

    def slow(text: str) -> list[str]:
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            joins = [
                (-PIECES[left + right], place)
                for place, (left, right) in enumerate(pairwise(parts))
                if left + right in PIECES
            ]
            if not joins:
                return parts
            _, place = min(joins)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]

    path, tokens = vocabulary(tmp_path / "x.gguf", sentencepiece)
    tokenizer, _ = built(path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("then   "), size=rng.integers(1, 25)))
        got = [tokens[index] for index in tokenizer.encode(text, add_special_tokens=False).ids]
        assert got == slow(text), text


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_token_list(["a", "b", "a"]), "token 'a' appears twice"),
        (lambda w: w.add_token_list(["a"] + [f"t{n}" for n in range(40)]), "41 tokens but fewer rows"),
        (lambda w: None, r"tokenizer\.ggml\.tokens is missing; expected a list of strings"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_named(add: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    oracle.finish(writer)
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(GgufFile(tmp_path / "x.gguf"))


def test_scores_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> list[str]:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.5])
        return ["a", "b"]

    with pytest.raises(CheckpointError, match="scores is a array; expected a list of 2 numbers"):
        read_tokenizer(GgufFile(vocabulary(tmp_path / "x.gguf", add)[0]))
