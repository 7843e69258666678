"""The folder whose sub-folders are models that may be loaded by name.

It is looked at in a thread: a network folder that answers slowly must not hold up whoever else is answered.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

CONFIG = "config.json"
SHOWN = 10
"""Names that a refusal lists."""


class Repository:
    """A view of the folder; without one it is empty."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    async def names(self) -> list[str]:
        """Models that lie there now; what cannot be looked at does not."""
        return [] if self._folder is None else await asyncio.to_thread(_models_in, self._folder)

    async def resolve(self, name: str) -> str:
        """The folder of a model of the repository, else `name` as it stands: a folder, or a hub id."""
        if self._folder is not None and name in await self.names():
            return str(self._folder / name)
        return name

    async def hint(self, name: str) -> str:
        """What to add to the refusal of a name that may have been meant for the repository; empty if it was not."""
        names = await self.names()
        if not names or name in names or "/" in name:
            return ""
        return f"; the repository holds {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"


def _models_in(folder: Path) -> list[str]:
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir() if os.path.isfile(path / CONFIG))
    return []
