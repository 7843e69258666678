"""What is checked of a model's folder before anything of it is read as a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from deepseek_tgi.errors import CheckpointError

MANIFEST = "SHA256SUMS"
"""As `sha256sum` writes and checks it: a line of digest and name for each file."""
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
MAX_MANIFEST_BYTES = 1 << 20
CHUNK_BYTES = 1 << 22
CHECKED = ("*.safetensors", "*.json", "*.jinja")
"""What a load reads: with a manifest, each of these must stand in it."""

Told = Callable[[float], None]


def check_hashes(folder: Path, manifest_sha256: str | None, told: Told) -> bool:
    """Hold every file that a load reads against the folder's manifest; false if there is none.

    `manifest_sha256` is what the manifest itself must hash to. Raises `CheckpointError` naming file, digest and
    expectation.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        if manifest_sha256 is not None:
            raise CheckpointError(f"{folder}: has no {MANIFEST}, expected one with SHA-256 {manifest_sha256}")
        return False
    if manifest_sha256 is not None:
        found = digest(manifest)
        if found != manifest_sha256.lower():
            raise CheckpointError(f"{manifest}: has SHA-256 {found}, expected {manifest_sha256.lower()}")
    listed = _listed(manifest)
    wanted = sorted({path.name for pattern in CHECKED for path in folder.glob(pattern)} | listed.keys())
    if unlisted := [name for name in wanted if name not in listed]:
        raise CheckpointError(f"{manifest}: does not list {', '.join(unlisted)}; expected every file that is read")
    total = sum(_size(folder / name) for name in wanted) or 1
    done = 0
    for name in wanted:
        found = digest(folder / name, lambda amount: told(100.0 * (done + amount) / total))  # noqa: B023 - called at once
        if found != listed[name]:
            raise CheckpointError(f"{folder / name}: has SHA-256 {found}, {MANIFEST} says {listed[name]}")
        done += _size(folder / name)
    return True


def digest(path: Path, told: Told = lambda _: None) -> str:
    """SHA-256 of a file. Raises `CheckpointError` if it cannot be read."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                found.update(piece)
                told(file.tell())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return found.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; {MANIFEST} lists it") from error


def _listed(manifest: Path) -> dict[str, str]:
    """Digest by file name. Names with a folder in them are refused: only what lies beside the manifest is read."""
    if manifest.stat().st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{manifest}: more than {MAX_MANIFEST_BYTES} bytes")
    listed = {}
    for number, line in enumerate(manifest.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        match = LINE.fullmatch(line)
        if match is None or "/" in match[2].removeprefix("./"):
            raise CheckpointError(f"{manifest}: line {number}: expected a SHA-256 and the name of a file beside it")
        listed[match[2].removeprefix("./")] = match[1].lower()
    return listed
