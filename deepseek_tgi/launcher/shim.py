"""Writes `text-generation-server` (and on wish `text-generation-launcher`) into a folder, for TGI's launcher to find.

They are not console scripts of this package: installing it beside TGI would overwrite TGI's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from deepseek_tgi.errors import ConfigError, ResourceError
from deepseek_tgi.launcher.process import python_argv

MODULES = {"text-generation-server": "deepseek_tgi.server", "text-generation-launcher": "deepseek_tgi.launcher.main"}
MARK = "# Written by deepseek-tgi shim; remove or rewrite at will."


def script(name: str) -> str:
    """The text of one command: `exec`, so that signals and the pid are the server's own."""
    command = " ".join(shlex.quote(part) for part in python_argv(MODULES[name]))
    return f'#!/bin/sh\n{MARK}\nexec {command} "$@"\n'


def write(folder: Path, names: list[str], force: bool) -> list[Path]:
    """Write the commands `names` into `folder`; their paths.

    Raises `ConfigError` before writing anything if one is there that we did not write, unless `force`;
    `ResourceError` if the folder cannot be written.
    """
    targets = [folder / name for name in names]
    for target in targets:
        if not force and os.path.lexists(target) and not _written_by_us(target):
            raise ConfigError(f"{target} exists and was not written by deepseek-tgi shim; --force overwrites it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target in targets:
            _replace(target, script(target.name))
    except OSError as error:
        raise ResourceError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return targets


def first_on_path(name: str) -> str | None:
    """What `name` starts today, so that the user learns whether the shim is found."""
    return shutil.which(name)


def _written_by_us(path: Path) -> bool:
    try:
        return MARK in path.read_text(encoding="utf-8", errors="replace")[:4096]
    except OSError:
        return False


def _replace(target: Path, content: str) -> None:
    """All of it or nothing: a launcher may run the old one at this moment."""
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
