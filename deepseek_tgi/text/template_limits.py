"""What one rendering of a template may use, and the checks made before and after an operation that makes text."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

from jinja2 import TemplateRuntimeError

MAX_STEPS = 200_000
MAX_SECONDS = 2.0
MAX_CHARACTERS = 16_000_000
MAX_BUILT_CHARACTERS = 256_000_000
"""Of all texts and lists made on the way, kept or not."""
MAX_ITEMS = 1_000_000
"""Of a list or dict, with those inside."""
MAX_NUMBER_BITS = 4096
_WIDE = re.compile(r"[:%][^}\s]{0,64}[0-9]{6}|%[^a-zA-Z%]*\*")
GROWING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "replace", "join", "format", "format_map"})


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS
        self._built = MAX_BUILT_CHARACTERS
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, characters: int) -> None:
        """One pass of a loop or macro whose literal text has so many characters."""
        self._steps -= 1
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise TemplateRuntimeError(f"the template ran for more than {MAX_STEPS} steps or {MAX_SECONDS:g} s")
        self.grow(characters)

    def grow(self, characters: int) -> None:
        """So many characters of output."""
        self._characters -= characters
        if self._characters < 0:
            raise too_long()

    def build(self, characters: int) -> None:
        """So many characters of a value on the way."""
        self._built -= characters
        if self._built < 0:
            raise too_long()


def too_long() -> TemplateRuntimeError:
    """The error of a text that grew too much."""
    return TemplateRuntimeError(f"the template made a text of more than {MAX_CHARACTERS} characters")


def size(value: Any) -> int:
    """About how many characters a value prints as, 0 if it is neither text nor a container.

    Raises: `TemplateRuntimeError` above the limits; so no list of lists can be made that prints without end.
    """
    if isinstance(value, str | bytes):
        return check_length(len(value))
    if not isinstance(value, list | tuple | dict):
        return 0
    total = seen = 0
    waiting: list[Any] = [value]
    while waiting:
        found = waiting.pop()
        items: Iterable[Any] = (*found.keys(), *found.values()) if isinstance(found, dict) else found
        seen += len(found)
        if seen > MAX_ITEMS:
            raise too_long()
        for item in items:
            if isinstance(item, list | tuple | dict):
                waiting.append(item)
            total += len(item) + 4 if isinstance(item, str | bytes) else 4
            if total > MAX_CHARACTERS:
                raise too_long()
    return total


def check_length(characters: int) -> int:
    """The same number, if it is allowed."""
    if characters > MAX_CHARACTERS:
        raise too_long()
    return characters


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Refuse a result that would not fit."""
    texts = [len(side) for side in (left, right) if isinstance(side, str | bytes)]
    lists = [len(side) for side in (left, right) if isinstance(side, list | tuple)]
    numbers = [side for side in (left, right) if isinstance(side, int)]
    if operator == "+":
        check_length(sum(texts))
    if operator == "*" and numbers and (texts or lists):
        check_length(sum(texts) * max(numbers[0], 0))
        if sum(lists) * max(numbers[0], 0) > MAX_ITEMS:
            raise too_long()
    if operator in "**" and len(numbers) == 2:
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_NUMBER_BITS:
            raise TemplateRuntimeError("the template computes with numbers that are too large")
    if operator == "%" and isinstance(left, str):
        check_format(left)


def check_method(name: str, owner: str, args: tuple[Any, ...]) -> None:
    """Refuse a call of a text's method whose result would not fit."""
    if any(isinstance(arg, int) and arg > MAX_CHARACTERS for arg in args):
        raise too_long()
    if name in {"format", "format_map"}:
        check_format(owner)
    if name == "expandtabs":
        check_length(len(owner) + owner.count("\t") * (args[0] if args and isinstance(args[0], int) else 8))
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        check_replace(owner, args[0], args[1])
    if name == "join" and args:
        check_join(owner, args[0])


def check_join(between: str, items: Any) -> None:
    """Refuse to join `items` (a text or a list) into too much."""
    texts = len(items) if isinstance(items, str) else sum(len(str(item)) for item in items)
    check_length(texts + len(between) * len(items))


def check_replace(text: str, old: str, new: str) -> None:
    """Refuse to put `new` into `text` too often."""
    check_length(len(text) + text.count(old) * len(new))


def check_format(pattern: str) -> None:
    """Refuse widths of six digits and those that an argument gives."""
    if _WIDE.search(pattern):
        raise too_long()
