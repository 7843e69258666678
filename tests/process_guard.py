"""Fails a test that leaves a process behind, its own child or an orphan further down, or closes a standard stream.

Choice: every process started from here inherits `PYTEST_GUARD_TAG` in its environment, and /proc is searched for it.
Prevents: a killed launcher's shard living on unseen, since orphans are no longer our children. Processes started while
a fixture is set up belong to that fixture and are judged when the whole run ends. Rejected: becoming the reaper of all
descendants, which would keep their zombies and upset tests that wait for a process id to vanish.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

TAG = "PYTEST_GUARD_TAG"
GRACE_S = 2.0
"""How long a process that was told to leave may take to be gone."""

SPAWNING = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}
INTERPRETER_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Children that the standard library starts once and keeps until the interpreter ends."""


STANDARD = ("stdin", "stdout", "stderr")


class ProcessGuard:
    """Plugin object: remembers what ran before each test body and looks again after its teardown."""

    def __init__(self) -> None:
        self._spawned = True
        self._before: set[int] = set()
        os.environ[TAG] = uuid.uuid4().hex
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _arguments: tuple[object, ...]) -> None:
        if event in SPAWNING:
            self._spawned = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        if self._spawned:  # by a fixture, or not yet looked at
            self._before = set(running())
            self._spawned = False
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        lost = [name for descriptor, name in enumerate(STANDARD) if not _open(descriptor)]
        if lost:
            for descriptor in sorted(STANDARD.index(name) for name in lost):
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
                os.set_inheritable(descriptor, True)
            pytest.fail(f"{item.nodeid} closed {', '.join(lost)}, which every later child inherits", pytrace=False)
        if not self._spawned:
            return
        left = wait_until_gone(self._before)
        if left:
            end(left)
            pytest.fail(f"{item.nodeid} left running: {_listed(left)}", pytrace=False)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        left = wait_until_gone(set())
        if left:
            end(left)
            sys.stderr.write(f"\nthe run left processes: {_listed(left)}\n")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def running() -> dict[int, int]:
    """Live processes of this run, ours excepted: id to parent id. A zombie has an empty environment and is not one."""
    tag = f"{TAG}={os.environ[TAG]}".encode()
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = Path(entry.path, "environ").read_bytes()
                # After the command in parentheses: state, parent.
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # gone meanwhile, or another user's
                continue
            if state != "Z" and (int(parent) == os.getpid() or tag in environment):
                found[int(entry.name)] = int(parent)
    return found


def wait_until_gone(known: set[int]) -> dict[int, str]:
    """Commands of the processes that are neither known, nor below known ones, once `GRACE_S` is over."""
    deadline = time.monotonic() + GRACE_S
    while True:
        now = running()
        left = {pid: _command(pid) for pid in now if not _belongs_to(pid, known, now)}
        left = {pid: name for pid, name in left.items() if name and not any(own in name for own in INTERPRETER_OWN)}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def end(processes: dict[int, str]) -> None:
    """Kill what is left, so that the tests after this one run on a quiet machine."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _listed(processes: dict[int, str]) -> str:
    return "; ".join(f"{pid} {command}" for pid, command in processes.items())


def _belongs_to(pid: int, known: set[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid in known:
            return True
        pid = parents[pid]
    return False


def _command(pid: int) -> str:
    try:
        words = Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return words.strip()[:200]
