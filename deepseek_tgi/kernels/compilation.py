"""Runs a C++ compiler over the native sources, as many at once as there are processors. No torch here.

The headers that nearly every file includes are compiled first, side by side with the largest files. A file that
starts once that is done takes them ready made; one that starts before, or whose compiler will not have them, reads them
itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 300
_LOOK_EVERY_S = 0.01
_HEADERS = "precompiled.h"


class RefusedError(Exception):
    """The compiler's own words."""


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    words: Path


class Compilation:
    """One compiler and its flags, `folder` of sources, and `work`, where all that it writes goes."""

    def __init__(self, compiler: str, flags: Sequence[str], folder: Path, work: Path) -> None:
        self._command = [compiler, *flags]
        self._folder = folder
        self._work = work

    def shared_library(self, target: Path) -> None:
        """Compile all sources and link them. Raises `RefusedError`, `OSError` or `subprocess.SubprocessError`."""
        sources = sorted(self._folder.glob("*.cpp"), key=lambda source: source.stat().st_size)
        headers = str(shutil.copy(self._folder / _HEADERS, self._work))
        ready = [f"-I{self._folder}", "-include", headers]
        making: _Running | None = self._start([*ready[:1], "-x", "c++-header", headers], Path(f"{headers}.gch"))
        running: list[_Running] = []
        objects: list[Path] = []
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            while sources or running:
                if making is not None and making.process.poll() is not None:
                    making = None
                running = [one for one in running if not _ended(one)]
                while sources and len(running) + (making is not None) < _processors():
                    source = sources.pop()
                    objects.append(self._work / f"{source.stem}.o")
                    running.append(self._start([*([] if making else ready), "-c", str(source)], objects[-1]))
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self._command, _TIMEOUT_S)
                time.sleep(_LOOK_EVERY_S)
        finally:
            for one in (*running, *([making] if making else [])):
                one.process.kill()
                one.process.wait()
        linking = self._start(["-shared", *map(str, sorted(objects))], target)
        linking.process.wait(timeout=_TIMEOUT_S)
        _ended(linking)

    def _start(self, arguments: Sequence[str], built: Path) -> _Running:
        """The compiler's temporary files go to `work` too: a killed one leaves them behind."""
        words = self._work / f"{built.name}.log"
        with words.open("wb") as log:
            process = subprocess.Popen(
                [*self._command, *arguments, "-o", str(built)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._work)},
            )
        return _Running(process, words)


def _processors() -> int:
    """At least two, so that the headers never keep all sources waiting."""
    return max(2, len(os.sched_getaffinity(0)))


def _ended(one: _Running) -> bool:
    """True once it has done its work. Raises `RefusedError` if it could not."""
    code = one.process.poll()
    if code:
        words = one.words.read_text(errors="replace").strip()
        raise RefusedError(words or f"exit status {code}")
    return code is not None
