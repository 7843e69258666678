"""What a look at something that works tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Finding:
    """Seconds without any sign, seconds without a stamp of progress, and where it is meanwhile.

    `complaint` is what else speaks against routing to it; `dead` why it will not come back.
    """

    still_s: float
    stuck_s: float
    where: str
    complaint: str | None = None
    dead: str | None = None


class Watched(Protocol):
    """Something that owes signs: a thread, another process."""

    def start_afresh(self, now: float) -> None:
        """Hold nothing from before `now` against it."""

    def look(self, now: float) -> Finding:
        """What can be said now. Never waits."""
