"""Builds the training text: what the teacher wrote, sieved, and what our own tables and plots give; as documents.

A document is a conversation or a plain text. Of each question some copies come without the chat marks, so that the model
also answers a bare line.
"""

from __future__ import annotations

import json
import lzma
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepseek_tgi.convert.demo_model import facts
from deepseek_tgi.convert.demo_model.definitions import definition
from deepseek_tgi.convert.demo_model.dialogues import Turns, by_hand, conversation
from deepseek_tgi.convert.demo_model.filters import agreement, clean_start, is_circular, is_clean, sentences
from deepseek_tgi.convert.demo_model.prompts import Prompt, make_prompts
from deepseek_tgi.convert.demo_model.stories import story

_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful AI assistant.",
    "You are a friendly assistant.", "You are Demo, a small language model.", "Answer the questions of the user.",
    "You answer in short sentences.", "Be helpful and polite.", "You are an AI assistant. Answer briefly.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """A conversation, or a plain text if `turns` is empty. `kind` names what it was made from."""

    kind: str
    turns: Turns
    text: str = ""
    system: str = ""


def read_teacher(folder: Path) -> Iterator[tuple[int, str]]:
    """Prompt numbers and texts of the files that `write_text` left."""
    for path in sorted(folder.glob("text-*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="ascii") as file:
            for line in file:
                number, text = json.loads(line)
                yield number, text


def teacher_answers(rows: Iterator[tuple[int, str]], prompts: list[Prompt], kept: int) -> list[tuple[str, str]]:
    """Questions with the answers that agree best with their likes, at most `kept` a question."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for number, text in rows:
        prompt = prompts[number]
        parts = sentences(text)[:4]
        if prompt.kind in ("story", "tale", "poem") or not parts:
            continue
        if is_clean(parts, prompt.needed) and not is_circular(parts):
            grouped[prompt.question].append(" ".join(parts))
    chosen = []
    for question, answers in grouped.items():
        alone = question.startswith("What is the difference")
        if len(answers) < (2 if alone else 4):
            continue
        answers = answers[:60]  # noqa: PLW2901 - the rest is not looked at
        scores = agreement(answers)
        best = sorted(range(len(answers)), key=scores.__getitem__, reverse=True)
        distinct = dict.fromkeys(answers[index] for index in best)
        chosen += [(question, answer) for answer in list(distinct)[: min(kept, max(1, len(answers) // 4))]]
    return chosen


def teacher_stories(rows: Iterator[tuple[int, str]], prompts: list[Prompt]) -> list[tuple[str, str]]:
    """Requests (empty for a story that began with our own words) and stories of four to nine sentences."""
    chosen = []
    for number, text in rows:
        prompt = prompts[number]
        if prompt.kind not in ("story", "tale"):
            continue
        whole = f"{prompt.opening}{text}" if prompt.opening else text
        parts = clean_start(whole, prompt.needed, 9)
        if len(parts) >= 4:
            chosen.append(("" if prompt.opening else prompt.question, " ".join(parts)))
    return chosen


def loosened(question: str, rng: random.Random) -> str:
    """The question as people type it: now and then with a polite lead, in lower case or without its mark."""
    draw = rng.random()
    if draw < 0.08 and question.split(maxsplit=1)[0] in ("What", "Why", "How", "Where", "Who", "Which"):
        question = (
            rng.choice(("Please tell me: ", "I have a question. ", "Can you answer this? ", "Hi! ", "Hello! "))
            + question
        )
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    return question


def asked(kind: str, question: str, answer: str, rng: random.Random) -> Document:
    """One question and its answer: three in four as a chat, the others as plain lines."""
    if rng.random() < 0.75:
        system = rng.choice(_SYSTEMS) if rng.random() < 0.25 else ""
        return Document(kind, [(loosened(question, rng), answer)], system=system)
    lead, mark = rng.choice((("", "\n"), ("", " "), ("", "\n\n"), ("Question: ", "\nAnswer: "), ("Q: ", "\nA: ")))
    return Document(kind, [], text=f"{lead}{question}{mark}{answer}")


def own_documents(count: int, seed: int) -> Iterator[Document]:
    """`count` documents from our own tables and plots."""
    rng = random.Random(seed)
    for _ in range(count):
        draw = rng.random()
        if draw < 0.26:
            told = story(rng)
            plain = rng.random() < 0.3
            yield Document("story", [], text=told.text) if plain else asked("story", told.request, told.text, rng)
        elif draw < 0.52:
            question, answer = next(facts.questions(1, rng))
            if rng.random() < 0.12:
                more = [answer for _, answer in facts.questions(rng.randint(0, 4), rng)]
                yield Document("facts", [], text=" ".join([answer, *more]))
            else:
                yield asked("facts", question, answer, rng)
        elif draw < 0.67:
            yield asked("hand", *by_hand(rng), rng)
        elif draw < 0.80:
            question, answer = definition(rng)
            yield Document("define", [], text=answer) if rng.random() < 0.1 else asked("define", question, answer, rng)
        else:
            system = rng.choice(_SYSTEMS) if rng.random() < 0.25 else ""
            yield Document("talk", [(loosened(q, rng), a) for q, a in conversation(rng)], system=system)


def teacher_documents(folder: Path, prompts: list[Prompt], kept: int, copies: int) -> list[Document]:
    """Documents of what the teacher wrote: each answer in as many wordings as `copies`, each story once."""
    rng = random.Random(1)
    answers = teacher_answers(read_teacher(folder), prompts, kept)
    found = [asked("answer", question, answer, rng) for question, answer in answers for _ in range(copies)]
    for request, text in teacher_stories(read_teacher(folder), prompts):
        found.append(asked("tale", request, text, rng) if request else Document("tale", [], text=text))
    return found


__all__ = ["Document", "make_prompts", "own_documents", "teacher_documents"]
