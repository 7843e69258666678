"""The end of a generation is the checkpoint's own id, wherever its files name it; variants of a model differ in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizer_kinds
from engine_driver import Driver
from scripted import ScriptedAdapter

from deepseek_tgi.core import FinishReason
from deepseek_tgi.text.tokenizer import TextTokenizer

VARIANTS: dict[str, tuple[str | None, dict[str, dict[str, Any]], str]] = {
    "base, named by its tokenizer": (tokenizer_kinds.EOS, {"config.json": {"eos_token_id": 1}}, tokenizer_kinds.EOS),
    "instruct, with a token of its own": (tokenizer_kinds.PAD, {"config.json": {"eos_token_id": 2}}, "<pad>"),
    "newer, listed for generation": (
        tokenizer_kinds.EOS,
        {"generation_config.json": {"eos_token_id": [0, 2]}, "config.json": {"eos_token_id": 1}},
        tokenizer_kinds.BOS,
    ),
    "named by no tokenizer": (None, {"config.json": {"eos_token_id": 2}}, tokenizer_kinds.PAD),
}
"""The tokenizer's end token, further files, and the token that the model says when it has finished."""


@pytest.mark.parametrize("name", VARIANTS)
def test_generation_stops_at_the_checkpoints_own_end(tmp_path: Path, name: str) -> None:
    eos_token, files, last = VARIANTS[name]
    folder = tokenizer_kinds.byte_level(tmp_path, eos_token=eos_token)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    tokenizer = TextTokenizer.from_folder(folder)
    end = tokenizer.token_id(last)
    assert end is not None
    driver = Driver(ScriptedAdapter(tokenizer))
    words = tokenizer.encode("abcd", add_special_tokens=False)
    assert len(words) == 4
    driver.adapter.say("Hello", [*words, end, *words])
    (found,) = driver.run(driver.request("Hello", 20))
    assert found.ids == [*words, end]
    assert found.reason is FinishReason.EOS_TOKEN
    assert found.final.text == "abcd"
