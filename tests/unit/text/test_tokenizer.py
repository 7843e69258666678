"""The tokenizer gives transformers' ids, and says clearly what it cannot read."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizer_kinds
from transformers import AutoTokenizer

from deepseek_tgi.errors import CheckpointError, RequestError
from deepseek_tgi.text.tokenizer import TextTokenizer

TEXTS = ["Hello world", "", " ", "the  two\n\tstop", "你好 😀 ünïcode", "a<s>b</s>", "Par is one " * 20]
BUILDERS = {"byte_level": tokenizer_kinds.byte_level, "byte_fallback": tokenizer_kinds.byte_fallback}
LLAMA_FLAGS = [(True, False), (True, True), (False, True), (False, False)]


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(tmp_path: Path, kind: str, text: str) -> None:
    folder = BUILDERS[kind](tmp_path)
    ours, theirs = TextTokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for specials in (True, False):
        assert ours.encode(text, specials) == theirs.encode(text, add_special_tokens=specials)
    ids = theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(("bos", "eos"), LLAMA_FLAGS)
def test_llama_class_flags_surround_the_text(tmp_path: Path, bos: bool, eos: bool) -> None:
    folder = tokenizer_kinds.byte_level(
        tmp_path, tokenizer_class="LlamaTokenizerFast", add_bos_token=bos, add_eos_token=eos
    )
    ours = TextTokenizer.from_folder(folder)
    # The flags are given as arguments because transformers 5 overlooks them in the file.
    theirs = AutoTokenizer.from_pretrained(folder, add_bos_token=bos, add_eos_token=eos)
    ids = ours.encode("Hello world")
    assert ids == theirs.encode("Hello world")
    assert (ids[0] == ours.bos_token_id, ids[-1] == ours.eos_token_id) == (bos, eos)
    assert ours.encode("Hello world", add_special_tokens=False) == theirs.encode(
        "Hello world", add_special_tokens=False
    )


def test_flags_of_other_classes_are_left_to_the_tokenizer_file(tmp_path: Path) -> None:
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path, add_bos_token=True))
    assert ours.bos_token_id not in ours.encode("Hello")


@pytest.mark.parametrize("limit", [2, 3, 5, 8, 100])
@pytest.mark.parametrize(("bos", "eos"), LLAMA_FLAGS)
def test_truncation_keeps_the_end_and_the_added_specials(tmp_path: Path, limit: int, bos: bool, eos: bool) -> None:
    folder = tokenizer_kinds.byte_level(
        tmp_path, tokenizer_class="LlamaTokenizer", add_bos_token=bos, add_eos_token=eos
    )
    theirs = AutoTokenizer.from_pretrained(folder, add_bos_token=bos, add_eos_token=eos, truncation_side="left")
    ours = TextTokenizer.from_folder(folder)
    text = "<s>Hello 你 world"
    assert ours.encode(text, truncate=limit) == theirs.encode(text, truncation=True, max_length=limit)


def test_truncate_zero_and_none_keep_everything(tmp_path: Path) -> None:
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path))
    assert ours.encode("Hello world", truncate=0) == ours.encode("Hello world") == ours.encode("Hello world", True, 99)


def test_offsets_are_bytes_of_the_input(tmp_path: Path) -> None:
    folder = tokenizer_kinds.byte_level(tmp_path, tokenizer_class="LlamaTokenizer", add_bos_token=True)
    text = "你Hello"
    spans = TextTokenizer.from_folder(folder).encode_with_offsets(text)
    # BOS is nowhere; the three bytes of the character share its range; then the word.
    assert [(s.text, s.start, s.stop) for s in spans] == [("", 0, 0), *[("你", 0, 3)] * 3, ("Hello", 3, 8)]
    assert all(text.encode()[s.start : s.stop].decode() == s.text for s in spans)


def test_lone_surrogates_are_a_request_error(tmp_path: Path) -> None:
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path))
    for call in (ours.encode, ours.encode_with_offsets):
        with pytest.raises(RequestError, match=r"character 2 is '.ud800'"):
            call("ab\ud800")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 5}, {7, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": 5}, {1}),
        ({}, {}, {1}),
    ],
    ids=["a list rules", "a single id yields to the tokenizer", "nothing else said"],
)
def test_end_ids_come_from_the_checkpoint(
    tmp_path: Path, generation: dict[str, object], config: dict[str, object], expected: set[int]
) -> None:
    folder = tokenizer_kinds.byte_level(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config))
    assert TextTokenizer.from_folder(folder).eos_token_ids == expected


def test_end_ids_without_a_named_token_come_from_the_config(tmp_path: Path) -> None:
    folder = tokenizer_kinds.byte_level(tmp_path, eos_token=None)
    assert TextTokenizer.from_folder(folder).eos_token_ids == frozenset()
    (folder / "config.json").write_text('{"eos_token_id": [4, 5]}')
    assert TextTokenizer.from_folder(folder).eos_token_ids == {4, 5}


def test_a_named_end_token_is_special_even_if_the_file_forgot(tmp_path: Path) -> None:
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path, eos_token="stop"))
    stop = ours.token_id("stop")
    assert stop is not None
    assert ours.is_special(stop)
    assert ours.decode([stop], skip_special_tokens=True) == ""


def test_tokens_known_only_to_the_config_are_added(tmp_path: Path) -> None:
    size = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path)).vocab_size
    extra = {str(size): {"content": "<|tool|>", "special": True}, "not a number": {"content": "x"}}
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path, added_tokens_decoder=extra))
    assert ours.encode("a<|tool|>")[-1] == size
    assert ours.is_special(size)
    assert ours.vocab_size == size + 1


@pytest.mark.parametrize(
    "odd",
    [{"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, {"tokenizer_class": ["LlamaTokenizer"]}],
    ids=["an id of 5000 digits", "a list as class"],
)
def test_odd_values_in_the_config_say_nothing(tmp_path: Path, odd: dict[str, object]) -> None:
    plain = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path))
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path, **odd))
    assert (ours.vocab_size, ours.encode("Hello")) == (plain.vocab_size, plain.encode("Hello"))


def test_ids_beyond_the_vocabulary_read_as_nothing(tmp_path: Path) -> None:
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path))
    assert ours.token_text(ours.vocab_size + 5) == ""


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tokenizer_kinds.byte_level(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        TextTokenizer.from_folder(folder)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path)


def test_threads_agree(tmp_path: Path) -> None:
    ours = TextTokenizer.from_folder(tokenizer_kinds.byte_level(tmp_path))
    texts = [f"Hello {i} world " * 50 for i in range(40)]
    alone = [ours.encode(t, truncate=100) for t in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda t: ours.encode(t, truncate=100), texts)) == alone
