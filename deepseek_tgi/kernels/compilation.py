"""Runs a C++ compiler over the native sources, as many at once as there are processors. No torch here.

The headers that nearly every file includes are compiled first, and taken ready made by all: reading the intrinsics
alone takes GCC as long as what most of the files hold.
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
        deadline = time.monotonic() + _TIMEOUT_S
        ready = self._headers(deadline)
        sources = sorted(self._folder.glob("*.cpp"), key=lambda source: source.stat().st_size)
        objects = [self._work / f"{source.stem}.o" for source in sources]
        waiting = [(["-c", str(source), *ready], built) for source, built in zip(sources, objects, strict=True)]
        self._run(waiting, deadline)
        self._run([(["-shared", *map(str, objects)], target)], deadline)

    def _headers(self, deadline: float) -> list[str]:
        """Compile the headers; the flags by which a source takes them, none if the compiler does not know how."""
        copy = str(shutil.copy(self._folder / _HEADERS, self._work))
        found = f"-I{self._folder}"
        try:
            self._run([(["-x", "c++-header", copy, found], Path(f"{copy}.gch"))], deadline)
        except RefusedError:
            return []
        return [found, "-include", copy]

    def _run(self, waiting: list[tuple[list[str], Path]], deadline: float) -> None:
        """Run the compiler for each (arguments, built file), the last first, one a processor at a time."""
        running: list[_Running] = []
        try:
            while waiting or running:
                running = [one for one in running if not _ended(one)]
                while waiting and len(running) < len(os.sched_getaffinity(0)):
                    running.append(self._start(*waiting.pop()))
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self._command, _TIMEOUT_S)
                time.sleep(_LOOK_EVERY_S)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()

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


def _ended(one: _Running) -> bool:
    """True once it has done its work. Raises `RefusedError` if it could not."""
    code = one.process.poll()
    if code:
        words = one.words.read_text(errors="replace").strip()
        raise RefusedError(words or f"exit status {code}")
    return code is not None
