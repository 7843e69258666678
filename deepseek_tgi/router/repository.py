"""The folder whose sub-folders are models that may be loaded by name."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.json"
SHOWN = 10
"""Names that a refusal lists."""


class Repository:
    """A view of the folder; without one it is empty."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def names(self) -> list[str]:
        """Models that lie there now."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(path.name for path in self._folder.iterdir() if (path / CONFIG).is_file())

    def resolve(self, name: str) -> str:
        """The folder of a model of the repository, else `name` as it stands: a folder, or a hub id."""
        if self._folder is not None and name in self.names():
            return str(self._folder / name)
        return name

    def hint(self, name: str) -> str:
        """What to add to the refusal of a name that may have been meant for the repository; empty if it was not."""
        names = self.names()
        if not names or name in names or "/" in name:
            return ""
        return f"; the repository holds {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"
