"""Without `--backend`, or with `--backend tgi`, TGI's own launcher takes over: found, said, and run in our place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepseek_tgi.config import DEFAULT_BACKEND
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.registry import RESERVED

NAME = "text-generation-launcher"
OURS = b"deepseek_tgi"
"""In every script of ours by that name: console script, shim, editable or not."""


def wanted_backend(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The backend asked for, before anything else is read; `tgi` if none."""
    for index, argument in enumerate(argv):
        if argument == "--backend" and index + 1 < len(argv):
            return argv[index + 1]
        if argument.startswith("--backend="):
            return argument.partition("=")[2]
    return environ.get("DEEPSEEK_TGI_BACKEND") or RESERVED


def without_backend(argv: Sequence[str]) -> list[str]:
    """argv without our one option, which TGI's launcher does not know; all else untouched."""
    kept: list[str] = []
    skip = False
    for argument in argv:
        if skip:
            skip = False
        elif argument == "--backend":
            skip = True
        elif not argument.startswith("--backend="):
            kept.append(argument)
    return kept


def find_tgi(search_path: str) -> str | None:
    """The first launcher on `search_path` that is not ours."""
    for folder in search_path.split(os.pathsep):
        candidate = Path(folder or ".") / NAME
        if candidate.is_file() and os.access(candidate, os.X_OK) and not is_ours(candidate):
            return str(candidate)
    return None


def is_ours(path: Path) -> bool:
    """True for a script of this package; an unreadable or compiled file is somebody else's."""
    try:
        with path.open("rb") as file:
            return OURS in file.read(65536)
    except OSError:
        return False


def hand_over(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Become TGI's launcher. Raises `ConfigError` if there is none, or it cannot be run."""
    found = find_tgi(environ.get("PATH", os.defpath))
    if found is None:
        raise ConfigError(
            f"no --backend (or --backend tgi) means TGI's own server, and no other {NAME} is on PATH; "
            f"to serve with this package: {NAME} --backend {DEFAULT_BACKEND}"
        )
    sys.stderr.write(f"deepseek-tgi: no backend of ours asked for; handing over to {found}\n")
    sys.stderr.flush()
    try:
        os.execve(found, [NAME, *without_backend(argv)], dict(environ))
    except OSError as error:
        raise ConfigError(f"{found} cannot be run ({error.strerror}); take it off PATH or install TGI again") from error
