"""`deepseek-tgi models` against servers that are none, that break off, and addresses that lead nowhere."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from deepseek_tgi.cli import main
from deepseek_tgi.launcher import models

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"stage": "loading", "percent": 10, "state": "running"}\n\n'


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads a request's head and does what `answer` says; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(5)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and the one line of complaint."""
    code = main(["models", *argv])
    (line,) = capsys.readouterr().err.splitlines()
    return code, line


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:3000", "ftp://127.0.0.1:3000", "file:///etc/passwd", "http://:80", "http://h:x", "http://[::1"],
)
def test_an_address_that_is_none_is_refused_with_what_would_work(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = said(capsys, "list", "--token", "t", "--url", url)
    assert code == 2
    assert line == f"deepseek-tgi: error: models: --url: got {url!r}, expected http://HOST:PORT"


@pytest.mark.parametrize("url", ["http://bad..host", "http://127.0.0.1:1"])
def test_an_address_that_leads_nowhere_is_told_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = said(capsys, "list", "--token", "t", "--url", url)
    assert code == 1
    assert line.startswith(f"deepseek-tgi: error: {url}: no server answers: ")


@pytest.mark.parametrize("token", ["a\nb", "a\0b", "\u20ac"])
def test_a_token_that_no_header_can_carry_is_refused_unseen(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = said(capsys, "list", "--token", token)
    assert code == 2
    assert "no header can carry" in line
    assert token not in line


def test_what_is_no_http_server_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda connection: connection.sendall(b"\0\0\x12\x04\0\r\n")) as url:
        code, line = said(capsys, "list", "--token", "t", "--url", url)
    assert code == 1
    assert line == f"deepseek-tgi: error: {url}: no server answers: its answer is no HTTP; name it with --url"


def test_a_server_that_dies_in_a_load_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def half(connection: socket.socket) -> None:
        connection.sendall(HEAD + b"%x\r\n%s\r\n" % (len(EVENT), EVENT) + b"ff\r\ndata: {")

    with answering(half) as url:
        code = main(["models", "load", "m", "--token", "t", "--url", url])
    shown = capsys.readouterr()
    assert code == 1
    assert shown.out == "loading 10 %\n"
    (line,) = shown.err.splitlines()
    assert line.startswith(f"deepseek-tgi: error: {url}: the server's answer broke off: ")


def test_a_server_that_says_nothing_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "ANSWER_TIMEOUT_S", 0.2)
    gone = threading.Event()

    def silent(_: socket.socket) -> None:
        gone.wait(5)

    with answering(silent) as url:
        code, line = said(capsys, "list", "--token", "t", "--url", url)
        gone.set()
    assert code == 1
    assert line == f"deepseek-tgi: error: {url}: no server answers: timed out; name it with --url"
