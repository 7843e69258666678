"""Progress bars: on stderr, and only where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress_bar(items: Iterable[T], what: str, wanted: bool) -> Iterator[T]:
    """Iterate over `items` under a bar labelled `what`."""
    from tqdm import tqdm

    yield from tqdm(items, desc=what, file=sys.stderr, disable=not (wanted and sys.stderr.isatty()))
