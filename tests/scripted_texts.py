"""What the scripted backend is told to say: every prompt is the name of a situation.

With the byte-level tokenizer of `tiny_tokenizer`, byte b is token b, so an output can be spelled byte by byte; the few
merged tokens give stop sequences something to end inside of.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_tokenizer import EOS_ID, IM_END_ID, IM_START_ID, VOCAB_SIZE, build_tokenizer, write_tokenizer
from tokenizer_kinds import byte_fallback
from tokenizers import Tokenizer

MODEL_VOCAB_SIZE = VOCAB_SIZE + 4
"""Padded above the tokenizer's, as published models are."""

MANY_BYTES = "naïve 日本語 🙂🏳️‍🌈 ok"
"""Characters of two, three and four bytes, and one made of several code points."""


def spell(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode())


def merged(text: str) -> list[int]:
    """The tokenizer's own, longest tokens."""
    ids: list[int] = build_tokenizer(add_bos=False).encode(text).ids
    return ids


def say() -> dict[str, list[int]]:
    """Prompt to output ids."""
    return {
        "bytes of many": [*spell(MANY_BYTES), EOS_ID],
        "cut character": [*spell("ab"), *spell("🙂")[:2]],
        "special inside": [*spell("a"), IM_START_ID, *spell("b"), EOS_ID],
        "other end": [*spell("hi"), IM_END_ID, *spell("never")],
        "three letters": [*spell("xyz"), *spell(" and more")],
        "merged word": [*spell("say "), *merged("hello"), *spell(" again")],
        "two stops": [*spell("one two three four")],
        "end text": [*spell("ab"), EOS_ID, *spell("cd")],
        "newline": [*spell("line\n\nnext")],
    }


def flat_logits() -> list[float]:
    """Fixed logits with a tie for the third place, a negative winner-to-be penalised, and a long tail."""
    rng = np.random.default_rng(7)
    row = rng.normal(0, 1.5, MODEL_VOCAB_SIZE).round(3)
    row[[65, 66]] = [6.0, 5.0]
    row[[67, 68]] = 4.0
    row[97] = -1.0
    return [float(x) for x in row]


def logits() -> dict[str, list[list[float]]]:
    """Prompt to logits rows."""
    return {"fixed logits aab": [flat_logits()]}


def write_scripted_model(folder: Path) -> Path:
    """A folder the scripted backend loads: byte-level tokenizer, two EOS ids, the script."""
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    _write(folder, {"say": say(), "logits": logits(), "eos": [EOS_ID, IM_END_ID], "vocab_size": MODEL_VOCAB_SIZE})
    return folder


def write_fallback_model(folder: Path) -> Path:
    """The same with a Llama-2 style tokenizer: leading spaces in the tokens, `<0xNN>` for rare characters."""
    byte_fallback(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("</s>")
    spelled = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "日🙂".encode()]
    words = [tokenizer.token_to_id(t) for t in ("▁the", "▁world", "▁one")]
    script = {"bytes of many": [*words[:2], *spelled, words[2], end], "plain words": [*words, end]}
    _write(folder, {"say": script, "eos": [end], "vocab_size": tokenizer.get_vocab_size()})
    return folder


def _write(folder: Path, script: dict[str, Any]) -> None:
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "config.json").write_text(json.dumps({"model_type": "scripted", "vocab_size": script["vocab_size"]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": script["eos"]}))


class Script:
    """The function from history to logits; tests call it too, to know what must come out."""

    def __init__(self, say: dict[tuple[int, ...], list[np.ndarray]], eos: frozenset[int], vocab_size: int) -> None:
        self._say = say
        self.eos = eos
        self.vocab_size = vocab_size

    def logits(self, history: Sequence[int]) -> np.ndarray:
        """`[V] float32` after `history`."""
        for length in range(len(history), 0, -1):
            rows = self._say.get(tuple(history[:length]))
            if rows is not None:
                return rows[min(len(history) - length, len(rows) - 1)]
        return logits_of(history, self.vocab_size)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Ids that an unhindered greedy run yields."""
        history = list(prompt)
        for _ in range(count):
            history.append(int(self.logits(history).argmax()))
        return history[len(prompt) :]


def logits_of(history: Sequence[int], vocab_size: int) -> np.ndarray:
    """Numbers that depend on every token of `history` and its place, the same in every process."""
    seed = zlib.crc32(np.asarray(history, dtype=np.int64).tobytes())
    return np.random.default_rng(seed).normal(0, 2, vocab_size).astype(np.float32)


def read_script(folder: Path) -> Script:
    """Load `script.json`; prompts are keyed by their ids, with and without special tokens in front."""
    raw = json.loads((folder / "script.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size = raw["vocab_size"]
    say: dict[tuple[int, ...], list[np.ndarray]] = {}
    for prompt, ids in raw.get("say", {}).items():
        rows = [np.where(np.arange(vocab_size) == i, 12.0, 0.0).astype(np.float32) for i in ids]
        for special in (True, False):
            say[tuple(tokenizer.encode(prompt, add_special_tokens=special).ids)] = rows
    for prompt, rows in raw.get("logits", {}).items():
        for special in (True, False):
            say[tuple(tokenizer.encode(prompt, add_special_tokens=special).ids)] = [
                np.asarray(row, dtype=np.float32) for row in rows
            ]
    return Script(say, frozenset(raw["eos"]), vocab_size)
