"""The product as a user starts it: one `text-generation-launcher` with its shard and router, watched from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 240.0


def launcher_command() -> list[str]:
    """The console script beside this interpreter or on PATH, else the module behind it."""
    beside = Path(sys.executable).with_name("text-generation-launcher")
    found = str(beside) if beside.exists() else shutil.which("text-generation-launcher")
    return [found] if found else [sys.executable, "-m", "deepseek_tgi.launcher.main"]


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def await_true(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Return as soon as `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s} s still not: {what}"
        time.sleep(0.03)


def alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> dict[int, str]:
    """Living processes below `pid`, with their command lines."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found: dict[int, str] = {}
    for candidate in parents:
        above = candidate
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and candidate != pid:
            try:
                found[candidate] = Path(f"/proc/{candidate}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process, mapped files left out."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@dataclass
class LaunchedServer:
    """One launcher and what it started."""

    process: subprocess.Popen[bytes]
    port: int
    uds_stem: Path
    output: list[bytes] = field(default_factory=list)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))
    _reader: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        model: Path | str | None,
        folder: Path,
        extra: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> LaunchedServer:
        """Run the launcher in a session of its own, return when `/health` says 200; without `model` none is named."""
        port, stem = free_port(), folder / "tgi"
        named = [] if model is None else ["--model-id", str(model)]
        argv = [*launcher_command(), "--backend", "deepseek-quant", *named, "--port", str(port)]
        argv += ["--hostname", "127.0.0.1", "--prometheus-port", str(free_port()), "--shard-uds-path", str(stem)]
        argv += ["--master-port", str(free_port()), "--router", "embedded", *extra]
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=os.environ | {"LOG_LEVEL": "info"} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = cls(process, port, stem)
        assert process.stdout is not None
        server._reader = threading.Thread(target=server.output.extend, args=(process.stdout,), daemon=True)
        server._reader.start()
        try:
            await_true(server._healthy, "/health answers 200", START_TIMEOUT_S)
        except BaseException as error:
            server.stop()
            raise RuntimeError(f"no server came up:\n{server.words()}") from error
        return server

    def _healthy(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the launcher left with {self.process.returncode}")
        try:
            return self.http.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def words(self) -> str:
        """All that was printed so far."""
        return b"".join(list(self.output)).decode(errors="replace")

    def children(self) -> dict[int, str]:
        """Everything below the launcher."""
        return descendants(self.process.pid)

    @property
    def shard_pid(self) -> int:
        """The process that holds the model."""
        return next(pid for pid, line in self.children().items() if " serve " in line and "uds-path" in line)

    @property
    def router_pid(self) -> int:
        """The process that holds the HTTP port."""
        return next(pid for pid, line in self.children().items() if "master-shard-uds-path" in line)

    def post(self, path: str, body: Any, timeout: float = 60.0) -> httpx.Response:
        """POST JSON."""
        return self.http.post(self.url + path, json=body, timeout=timeout)

    def generate(self, text: str, **parameters: Any) -> dict[str, Any]:
        """`/generate` with details; the parsed answer."""
        body = {"inputs": text, "parameters": {"details": True, **parameters}}
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, body: Any) -> list[str]:
        """The payloads of a server-sent stream, read to its end."""
        with self.http.stream("POST", self.url + path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = "".join(response.iter_text())
        assert text.endswith("\n\n")
        payloads = [e for e in text.removesuffix("\n\n").split("\n\n") if e not in ("", ":")]
        assert all(p.startswith("data: ") for p in payloads), text
        return [p.removeprefix("data: ") for p in payloads]

    @contextmanager
    def streaming(self, text: str, max_new_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
        """An open `/generate_stream`; leaving the block closes the connection."""
        body = {"inputs": text, "parameters": {"max_new_tokens": max_new_tokens}}
        with self.http.stream("POST", f"{self.url}/generate_stream", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))

    def metric(self, name: str) -> float:
        """The value of an unlabelled series, 0 if it was never recorded."""
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        return 0.0

    def idle(self) -> bool:
        """True if nothing is queued and no batch runs."""
        return self.metric("tgi_queue_size") == 0 and self.metric("tgi_batch_current_size") == 0

    def wait(self, timeout_s: float = 30.0) -> int:
        """The launcher's exit status."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"the launcher still runs after {timeout_s} s:\n{self.words()}") from None
        if self._reader is not None:
            self._reader.join(5)
        return status

    def stop(self) -> None:
        """SIGTERM, wait, and kill whatever is left."""
        self.http.close()
        below = set(self.children())
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in filter(alive, below):
            os.kill(pid, signal.SIGKILL)
        if self._reader is not None:
            self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()


def run_to_the_end(argv: Sequence[str], timeout_s: float = 60.0, **how: Any) -> subprocess.CompletedProcess[str]:
    """A command that is expected to leave by itself; its output as text."""
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False, **how
    )
