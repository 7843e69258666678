"""Which of the teacher's answers are worth learning from.

Two sieves: a text must be clean English that does not repeat itself and speaks of what was asked; and among many
answers to one question those are kept that agree most with the others, since a small model is right more often than it
is wrong in any one way.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

_SENTENCE = re.compile(r"[^.!?]+[.!?]+[\"']?")
_WORD = re.compile(r"[a-z']+")
_BANNED = re.compile(
    r"\b(SmolLM|Hugging|AI|assistant|Lena|Rolf|Marta|heron|potter|hare|Mrs\. Hill|user|prompt|chlorophyll|Here's|"
    r"I'm|I am an|I can't|I'd|sorry|sexual|sex|kill|killed|blood|drunk|alcohol|wine|naked|suicide|rape|murder)\b"
)
_COMMON = frozenset(
    "about after again also always another around because before being could different each every everyone first from "
    "have helps into itself just keep like made make many more most much often other over people person place same "
    "should small some something such than that their them then there these they thing things this those through time "
    "used uses using very water well what when where which while with without would your".split()
)


def sentences(text: str) -> list[str]:
    """The whole sentences of a text, in order; what follows the last full stop is dropped."""
    return [part.strip() for part in _SENTENCE.findall(" ".join(text.split()))]


def is_clean(parts: Sequence[str], needed: Sequence[str], most_repeats: int = 4) -> bool:
    """True for sentences that hold what is needed, nothing unwanted, and no loops."""
    text = " ".join(parts)
    found = _WORD.findall(text.lower())
    if len(found) < 4 or _BANNED.search(text) or any(word not in text.lower() for word in needed):
        return False
    if any(not (part[0].isupper() or part[0] in "\"'" or part[0].isdigit()) for part in parts) or text.count('"') % 2:
        return False
    if any(first == second for first, second in itertools.pairwise(found)):
        return False
    openings = Counter(" ".join(_WORD.findall(part.lower())[:3]) for part in parts)
    if openings and max(openings.values()) > 2:
        return False
    threes = Counter(zip(found, found[1:], found[2:], strict=False))
    if sum(count - 1 for count in threes.values()) > max(1, len(found) // 25):
        return False
    heavy = Counter(word for word in found if len(word) > 3 and word not in _COMMON)
    return not heavy or heavy.most_common(1)[0][1] <= most_repeats


def clean_start(text: str, needed: Sequence[str], most: int) -> list[str]:
    """The longest run of at most `most` whole sentences from the start that is clean; empty if none is."""
    parts = sentences(text)[:most]
    while parts and not is_clean(parts, needed, most_repeats=3 + len(parts) // 2):
        parts.pop()
    return parts


def is_circular(parts: Sequence[str]) -> bool:
    """True for "a window is a window": the subject's noun comes again right after the verb."""
    match = re.match(
        r"(?:an?|the)?\s*(\w+?)s? (?:is|are) (?:an?|the|a type of|a kind of|a piece of)?\s*(?:\w+ )?(\w+?)s?\b",
        parts[0].lower(),
    )
    return match is not None and match.group(1) == match.group(2)


def agreement(texts: Sequence[str]) -> list[float]:
    """For each text, its mean overlap with the others: the F1 of their sets of words."""
    bags = [frozenset(_WORD.findall(text.lower())) for text in texts]
    scores = []
    for index, bag in enumerate(bags):
        total = sum(2 * len(bag & other) / (len(bag) + len(other) or 1) for at, other in enumerate(bags) if at != index)
        scores.append(total / max(1, len(bags) - 1))
    return scores
