"""One child process: in its own group, its pipes read by threads, its end seen, its whole group gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GUARD = str(Path(__file__).with_name("guard.py"))
KEPT_STDERR_BYTES = 256 * 1024
MAX_READ_BYTES = 32768

OnLine = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run.

    Without `on_stderr` the end of stderr is kept for `stderr_text`; with `shares_stderr` it is our own, and a progress
    bar is seen. With `holds_stdin` the child gets a pipe whose end tells it that we died. `closing_s` is added to
    the time it gets after SIGTERM.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    on_stdout: OnLine
    on_stderr: OnLine | None = None
    holds_stdin: bool = False
    shares_stderr: bool = False
    closing_s: float = 0.0


def python_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Run a module of ours with this interpreter; the working folder must not shadow anything."""
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    return (sys.executable, *safe, "-m", module, *arguments)


class Child:
    """A running child. Made and stopped by the launcher's main thread, whose death the kernel answers with SIGKILL."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._stderr: deque[bytes] = deque()
        self._stderr_bytes = 0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", GUARD, str(os.getpid()), *spec.argv],
            stdin=subprocess.PIPE if spec.holds_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if spec.shares_stderr else subprocess.PIPE,
            env=dict(spec.env),
        )
        streams = ((self._process.stdout, spec.on_stdout), (self._process.stderr, spec.on_stderr or self._keep))
        self._readers = [self._read(pipe, on_line) for pipe, on_line in streams if pipe is not None]

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs. Once it has ended: what was left of its group is killed, all output is read."""
        if self._process.returncode is None:
            # Looked at without reaping: until then neither the pid nor the group id can belong to anybody else.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            for reader in self._readers:
                reader.join(5.0)
            if self._process.stdin is not None:
                self._process.stdin.close()
        return self._process.returncode

    def terminate(self) -> None:
        """SIGTERM to the process alone, as TGI's launcher does."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if self.exit_code() is None:
            self._process.kill()
            self._signal_group(signal.SIGKILL)

    def wait(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """True if it ended within `timeout_s` and before `hurry()` became true."""
        deadline = time.monotonic() + timeout_s
        while self.exit_code() is None:
            if hurry() or time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def stderr_text(self) -> str:
        """The kept end of stderr."""
        return b"".join(self._stderr).decode(errors="replace")

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def _read(self, pipe: IO[bytes], on_line: OnLine) -> threading.Thread:
        def loop() -> None:
            with pipe:
                while line := pipe.readline(MAX_READ_BYTES):
                    on_line(line)

        thread = threading.Thread(target=loop, name=f"{self.spec.name} output", daemon=True)
        thread.start()
        return thread

    def _keep(self, line: bytes) -> None:
        self._stderr.append(line)
        self._stderr_bytes += len(line)
        while self._stderr_bytes > KEPT_STDERR_BYTES and len(self._stderr) > 1:
            self._stderr_bytes -= len(self._stderr.popleft())


def describe_exit(code: int) -> str:
    """`code 3` or `signal SIGKILL`."""
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"code {code}"
