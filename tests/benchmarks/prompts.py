"""What everyone is asked: English prose that every Python carries, cut to counted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from tests.benchmarks.workers import Passage

if TYPE_CHECKING:
    from deepseek_tgi.text.tokenizer import TextTokenizer

PROBE, ANSWER = "The capital of France is", "Paris"
LONG_TOKENS, SHORT_TOKENS = 512, 16
STREAMS, STREAM_PROMPT_TOKENS = 16, 64


@dataclass(frozen=True, slots=True)
class Prompts:
    """The same for every side."""

    short: Passage
    long: Passage
    streams: tuple[Passage, ...]
    probe: Passage


class FreshTexts:
    """The texts of the streams with a number in front that was never used: no prefix cache may know them already."""

    def __init__(self, tokenizer: TextTokenizer, prompts: Prompts) -> None:
        self._texts = [tokenizer.decode(passage.ids) for passage in prompts.streams]
        self._numbers = count(1000)

    def draw(self) -> list[str]:
        """One text a stream."""
        return [f"Page {next(self._numbers)}. {text}" for text in self._texts]


def make_prompts(tokenizer: TextTokenizer) -> Prompts:
    """Cut the passages; each begins somewhere else."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))

    def passage(start: int, tokens: int) -> Passage:
        part = text[start : start + 12 * tokens]
        ids = tokenizer.encode(part, truncate=tokens)
        assert len(ids) == tokens, f"{len(part)} characters gave {len(ids)} tokens, expected at least {tokens}"
        return Passage(part, ids)

    return Prompts(
        short=passage(1000, SHORT_TOKENS),
        long=passage(9000, LONG_TOKENS),
        streams=tuple(passage(20000 + 20000 * i, STREAM_PROMPT_TOKENS) for i in range(STREAMS)),
        probe=Passage(PROBE, tokenizer.encode(PROBE)),
    )
