"""`deepseek-tgi quickstart`: a small model served and asked one question, with nothing to prepare.

The launcher runs as a child, exactly as a user would start it; this module only waits, asks and shows.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_tgi.adapters.hub import SMALL_MODEL_ID, resolve_folder
from deepseek_tgi.config import DEFAULT_BACKEND
from deepseek_tgi.errors import CheckpointError, ChildError
from deepseek_tgi.launcher.check import check_port
from deepseek_tgi.launcher.main import StopSignals, prepared_model, stop
from deepseek_tgi.launcher.process import Child, Spec, describe_exit, python_argv
from deepseek_tgi.launcher.shards import ERRORS_BY_EXIT_CODE

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 100.0
SHOWN_LINES = 40
_WARNING = b"  WARN "
_COMPILING = b"compiling the native kernels"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What to serve and ask. `leave` ends after the answer; otherwise it serves until Ctrl-C."""

    model_id: str
    port: int
    question: str
    leave: bool


def run(wish: Wish, say: Say) -> int:
    """Serve, ask, show; 0 once asked to stop. Raises the taxonomy's errors. `say` writes to the terminal as it is."""
    check_port(HOST, wish.port, "--port")
    signals = StopSignals()
    signals.install()
    say(f"Preparing {wish.model_id} …{_first_time(wish.model_id)}\n")
    if prepared_model(wish.model_id, os.environ, signals) is None:
        return 0
    tail: deque[bytes] = deque(maxlen=SHOWN_LINES)
    with tempfile.TemporaryDirectory(prefix="deepseek-tgi-") as folder:
        child = Child(_spec(wish, Path(folder), tail))
        try:
            say(f"Starting {wish.model_id} on http://{HOST}:{wish.port} … ")
            if not _wait_healthy(wish, child, signals, tail, say):
                return 0
            say("ready.\n" + _warnings(tail) + f"\n> {wish.question}\n")
            for piece in _answer(wish):
                say(piece)
            say("\n")
            if not wish.leave:
                say(_examples(wish))
                _wait_until_stopped(child, signals, tail)
                say("\nStopping; a running request may finish, a second Ctrl-C ends it.\n")
        finally:
            stop(child, STOP_TIMEOUT_S, signals)
    return 0


def _first_time(model_id: str) -> str:
    """Why the small model takes so long, if it is not on this machine yet."""
    if model_id != SMALL_MODEL_ID:
        return ""
    try:
        resolve_folder(model_id)
    except CheckpointError:
        return " (once: downloads about 100 MB and converts them, then compiles the kernels)"
    return ""


def _warnings(tail: Iterable[bytes]) -> str:
    """The server's warnings so far, a line each: it may have fallen back to slower kernels."""
    return "".join(line.decode(errors="replace") for line in tail if _WARNING in line)


def _spec(wish: Wish, folder: Path, tail: deque[bytes]) -> Spec:
    options = ["--backend", DEFAULT_BACKEND, "--router", "embedded", "--model-id", wish.model_id, "--hostname", HOST]
    options += ["--port", str(wish.port), "--shard-uds-path", str(folder / "shard")]
    return Spec("server", python_argv("deepseek_tgi.launcher.main", *options), os.environ, tail.append, tail.append)


def _wait_healthy(wish: Wish, child: Child, signals: StopSignals, tail: deque[bytes], say: Say) -> bool:
    """True when the router answers, false if asked to stop meanwhile. Says why it takes so long on a new machine."""
    told = False
    while not signals.stopping():
        _check(child, tail)
        if not told and any(_COMPILING in line for line in tuple(tail)):
            told = True
            say("(compiling the kernels for this machine, once) … ")
        try:
            with _open(f"http://{HOST}:{wish.port}/health"):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def _wait_until_stopped(child: Child, signals: StopSignals, tail: deque[bytes]) -> None:
    while not signals.stopping():
        _check(child, tail)
        time.sleep(0.1)


def _check(child: Child, tail: deque[bytes]) -> None:
    code = child.exit_code()
    if code is not None:
        shown = b"".join(tail).decode(errors="replace")
        error = ERRORS_BY_EXIT_CODE.get(code, ChildError)
        raise error(f"the server ended with {describe_exit(code)}; its last lines:\n{shown}")


def _open(url: str, body: dict[str, Any] | None = None) -> Any:
    """Open a loopback url; a proxy of the environment has no business there."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=300)


def _body(wish: Wish) -> dict[str, Any]:
    messages = [{"role": "user", "content": wish.question}]
    return {"model": "tgi", "messages": messages, "stream": True, "max_tokens": 100, "temperature": 0}


def _answer(wish: Wish) -> Iterator[str]:
    """The pieces of the answer as they come. Raises `ChildError` if the server refuses."""
    try:
        with _open(f"http://{HOST}:{wish.port}/v1/chat/completions", _body(wish)) as response:
            for line in response:
                data = line.decode(errors="replace").removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ChildError(f"the server answered: {event['error']}")
                for choice in event.get("choices", ()):
                    yield choice["delta"].get("content") or ""
    except (urllib.error.URLError, OSError) as error:
        raise ChildError(f"the server did not answer: {error}") from error


def _examples(wish: Wish) -> str:
    url = f"http://{HOST}:{wish.port}"
    header = "-H 'content-type: application/json'"
    native = json.dumps({"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}})
    return (
        f"\nThe server goes on until Ctrl-C. Ask it from another terminal:\n\n"
        f"  curl {url}/v1/chat/completions {header} -d {shlex.quote(json.dumps(_body(wish)))}\n\n"
        f"  curl {url}/generate {header} -d {shlex.quote(native)}\n\n"
    )


def write_through(text: str) -> None:
    """Show a piece at once; a closed terminal is the reader's choice."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        return
