"""The two HTTP servers under load: ours by its launcher, llama.cpp's by its own module."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.measure import peak_memory_bytes

READY_S = 180.0


class Server:
    """A running server: where it listens and what it has used."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def peak_memory_bytes(self) -> dict[str, int]:
        """Largest resident size so far, by process."""
        return peak_memory_bytes(self.process.pid)


@contextmanager
def our_server(model: Path) -> Iterator[Server]:
    """`text-generation-launcher --backend deepseek-quant` with the embedded router and default limits."""
    port = _free_port()
    launcher = shutil.which("text-generation-launcher", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if launcher is None:
        raise SystemExit("text-generation-launcher is not installed: pip install -e . first")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        argv = [
            *(launcher, "--backend", "deepseek-quant", "--router", "embedded", "--model-id", str(model)),
            *("--hostname", "127.0.0.1", "--port", str(port), "--shard-uds-path", f"{folder}/shard"),
        ]
        with _running(argv, f"http://127.0.0.1:{port}", "/health") as server:
            yield server


@contextmanager
def llama_server(python: str, gguf: Path) -> Iterator[Server]:
    """`python -m llama_cpp.server`, which serves one stream at a time and queues the others."""
    port, threads = _free_port(), str(len(os.sched_getaffinity(0)))
    argv = [
        *(python, "-m", "llama_cpp.server", "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)),
        *("--n_ctx", "4096", "--n_threads", threads, "--n_threads_batch", threads),
        *("--interrupt_requests", "false", "--verbose", "false"),
    ]
    with _running(argv, f"http://127.0.0.1:{port}", "/v1/models") as server:
        yield server


@contextmanager
def _running(argv: Sequence[str], url: str, probe: str) -> Iterator[Server]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_ready(process, url + probe)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            _stop(process)
            raise
        try:
            yield Server(process, url)
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server left with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"{url} did not answer within {READY_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
