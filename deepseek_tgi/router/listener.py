"""The HTTP server under the application: uvicorn, with what it leaves to be desired here."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deepseek_tgi.errors import ResourceError
from deepseek_tgi.router.http import App

BACKLOG = 2048
KEEP_ALIVE_TIMEOUT_S = 75
CLOSE_TIMEOUT_S = 3
HALF_CLOSE_GRACE_S = 0.02
"""Time for a refusal to reach a client that has closed its sending half."""
MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 32
MAX_PIPELINED_BYTES = 64 * 1024
FRAMING_RATIO = 16
"""Bytes of chunk headers that one byte of body may come with."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)


class Protocol(HttpToolsProtocol):
    """What HTTP leaves to the server, decided for long answers and for clients that mean harm.

    - A client that closes its sending half after the request is answered if the answer is quick. End-of-file is all
      that can be seen of a client that left, so a generation must not go on for long after it; but a refusal is ready
      in milliseconds, and the client may be there to read it.
    - A client that leaves is gone for all its requests, also if others are pipelined behind the one being answered.
      To see it go we keep reading, so what is pipelined must be little.
    - `Upgrade` is ignored: clients that offer HTTP/2 that way (Java's) send a body behind it, which must be read.
    - Heads, trailers and the framing of chunks have a limit, as bodies do.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._overhead_bytes = 0
        self._unanswered: list[RequestResponseCycle] = []

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse what has no end."""
        if self._in_head:
            head, blank, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nx-ignored", head) + blank + rest
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self._overhead_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if not self._waiting():
                self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """A request begins; it may be one that was sent before the last one was answered."""
        self._in_head = False
        self._overhead_bytes = 0
        super().on_headers_complete()
        self._unanswered = [*self._waiting(), self.cycle]
        if self.pipeline:
            self.flow.resume_reading()
            if len(self.pipeline) > MAX_PIPELINED:
                self.transport.close()

    def on_body(self, body: bytes) -> None:
        """Part of a body, which pays for its framing."""
        self._overhead_bytes -= FRAMING_RATIO * len(body)
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > MAX_PIPELINED_BYTES:
            self.transport.close()

    def on_message_complete(self) -> None:
        """The next bytes are a head."""
        self._in_head = True
        self._overhead_bytes = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request that waits, and not the latest alone."""
        for cycle in self._waiting():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for a moment while a request has not been answered; else close it now."""
        waiting = self._waiting()
        if not waiting or waiting[0].response_started:
            return False
        self.loop.call_later(HALF_CLOSE_GRACE_S, self.transport.close)
        return True

    def _waiting(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._unanswered if not cycle.response_complete]


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the process drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to us."""
        yield


def server_for(app: App) -> Server:
    """A server for `app`; run it with `serve(sockets=[...])`, stop it by `should_exit`."""
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is told before minutes of warm-up.

    Raises: `ResourceError` naming the address.
    """
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((hostname, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"{hostname}:{port}: cannot listen: {error.strerror}; free the port or choose another with --port"
        ) from error
    return listener
