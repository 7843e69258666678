"""A folder that appears whole or not at all.

Everything is written into a hidden sibling, synced, and renamed at the end; any failure removes the sibling. A sibling
whose process is gone (killed, power lost) is removed by the next run for the same folder, as is one of our own process
id: in a container each run may have the same. One process makes a folder once at a time.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deepseek_tgi.errors import ConfigError, ResourceError

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `out` when the block ends without an error.

    Raises: `ConfigError` if `out` exists or cannot be made, `ResourceError` if the disk is full. Then nothing is left.
    """
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    if os.path.lexists(out):
        raise ConfigError(f"{out}: exists already; expected a path that does not exist")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        partial.mkdir()
    except OSError as error:
        raise _explain(error, out) from error
    try:
        yield partial
        _sync(partial)
        # rename(2) replaces an empty folder without a word, and another process may have made one meanwhile.
        if os.path.lexists(out):
            raise ConfigError(f"{out}: was made by another process meanwhile")
        partial.rename(out)
        _sync_folder(out.parent)
    except OSError as error:
        raise _explain(error, out) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, object], indent: int | None = 2) -> None:
    """Write an object as UTF-8 JSON; `indent` None is for long files, where it is five times faster."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")


def _explain(error: OSError, out: Path) -> Exception:
    if error.errno in _DISK_FULL:
        free = shutil.disk_usage(_existing_parent(out)).free
        return ResourceError(f"{out}: the disk is full ({error.strerror}, {free} are free); nothing was left behind")
    return ConfigError(f"{out}: cannot be written: {error.strerror or error}")


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def _remove_abandoned(out: Path) -> None:
    prefix = f".{out.name}.partial-"
    for path in out.parent.iterdir():
        owner = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and owner.isdecimal() and not _is_at_work(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _is_at_work(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
