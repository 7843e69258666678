"""The folder through which a test looks into, and interferes with, the backend of a shard in another process."""

from __future__ import annotations

import builtins
import json
import os
import time
from pathlib import Path
from typing import Any

WINDOW = "CONFORMANCE_WINDOW"
"""Environment name of the folder that both sides see: `control.json` goes in, `steps.jsonl` comes out."""

ENTRY_POINTS = """\
[deepseek_tgi.backends]
watched = watched_backend:WatchedAdapter
scripted = watched_backend:ScriptedAdapter
"""


def install(folder: Path) -> dict[str, str]:
    """Write the metadata of an installed distribution; the environment that lets a child find it."""
    info = folder / "conformance_backends-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-backends\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    path = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


class Window:
    """The adapter's side of the shared folder."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[WINDOW])
        self._log = (self._folder / "steps.jsonl").open("a")

    def obey(self, late: bool = False) -> None:
        """Sleep or fail if `control.json` says so, once; a `late` order is for after the step has stored its tokens."""
        path = self._folder / "control.json"
        try:
            order = json.loads(path.read_text())
        except FileNotFoundError:
            return
        if order.get("late", False) != late:
            return
        path.unlink()
        time.sleep(order.get("sleep_s", 0))
        if "error" in order:
            raise error_class(order["error"])(order["message"])

    def write(self, record: dict[str, Any]) -> None:
        """One line a step."""
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()


def error_class(name: str) -> type[BaseException]:
    """A built-in exception, or torch's for a full device."""
    if name == "OutOfMemoryError":
        import torch

        return torch.OutOfMemoryError
    found: type[BaseException] = getattr(builtins, name)
    return found
