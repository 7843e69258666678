"""The shard's unix socket: checked early, bound under a temporary name, and shown under its own when it answers.

TGI's launcher takes the path's existence as readiness and its router connects once; a path that exists before the
socket listens kills the router.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from deepseek_tgi.errors import ResourceError

MAX_PATH_BYTES = 107
"""`sun_path` holds 108 bytes with its terminator (unix(7))."""


def rank_path(stem: str, rank: int) -> str:
    """Where rank `rank` listens."""
    return f"{stem}-{rank}"


def check_path(path: str) -> None:
    """Raise `ResourceError` if no socket can be bound at `path`, or a living process already listens there."""
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ResourceError(f"socket path {path!r} has {size} bytes, a unix socket allows {MAX_PATH_BYTES}; shorten it")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ResourceError(f"socket path {path!r}: {folder!r} is not a folder; create it or choose another path")
    _try_binding(path, folder)
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ResourceError(f"socket path {path!r} exists and is no socket; remove it or choose another path")
    if listens(path):
        raise taken(path)


def taken(path: str) -> ResourceError:
    """The error for a path at which another shard listens."""
    return ResourceError(
        f"socket path {path!r} is in use by a running shard; stop it or choose another path (--shard-uds-path)"
    )


def _try_binding(path: str, folder: str) -> None:
    """The only test that tells the truth on every file system and for every user."""
    trial = temporary_path(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(trial)
        except OSError as error:
            raise ResourceError(
                f"socket path {path!r}: cannot make a socket in {folder!r} ({error.strerror}); choose another path"
            ) from error
    os.unlink(trial)


def listens(path: str) -> bool:
    """True if somebody accepts connections at `path`; a dead process's socket refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            return isinstance(error, (TimeoutError, BlockingIOError))
        return True


def listener_pid(path: str) -> int | None:
    """The process that listens at `path`, as the kernel knows it; None if nobody does, or none that we can see."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    return int(struct.unpack("3i", credentials)[0]) or None


def remove_stale(path: str) -> None:
    """Remove a dead socket at `path`; anything else is left to `check_path` to refuse."""
    if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode) and not listens(path):
        os.unlink(path)


def temporary_path(path: str) -> str:
    """A free name beside `path` and no longer than it, for binding before the path is shown."""
    folder, name = os.path.split(path)
    width = max(1, min(12, len(os.fsencode(name)) - 1))
    for _ in range(1000):
        candidate = os.path.join(folder, "." + os.urandom(8).hex()[:width])
        if not os.path.lexists(candidate):
            return candidate
    raise ResourceError(f"socket path {path!r}: no free temporary name in {folder or '.'!r}; choose a longer name")


class Publication:
    """Owns the visible path: `show` puts the bound socket there in one step, `hide` removes it if it is still ours."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bound_path = temporary_path(path)
        self._inode: int | None = None

    def show(self) -> None:
        """Rename the bound socket to its path, replacing a dead one.

        Raises: `ResourceError` if another shard has come to listen there meanwhile: its clients must not get ours.
        """
        if listens(self.path):
            raise taken(self.path)
        self._inode = os.stat(self.bound_path).st_ino
        os.rename(self.bound_path, self.path)

    def hide(self) -> None:
        """Remove what we made; another process's socket at the path stays."""
        Path(self.bound_path).unlink(missing_ok=True)
        if self._inode is not None and os.path.lexists(self.path) and os.lstat(self.path).st_ino == self._inode:
            os.unlink(self.path)
