"""The HTTP server under the application: uvicorn, with what it leaves to be desired here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deepseek_tgi.errors import ResourceError
from deepseek_tgi.router.app import RouterApp

BACKLOG = 2048
KEEP_ALIVE_TIMEOUT_S = 75
CLOSE_TIMEOUT_S = 3
HALF_CLOSE_GRACE_S = 0.02
"""Time for a refusal to reach a client that has closed its sending half."""


class Protocol(HttpToolsProtocol):
    """Answers clients that close their sending half after the request, if the answer is quick.

    End-of-file is all that can be seen of a client that left, so a generation must not go on for long after it; but a
    refusal is ready in milliseconds, and the client may be there to read it.
    """

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for a moment while a request has not been answered; else close it now."""
        cycle = self.cycle
        if cycle is None or cycle.response_started or cycle.response_complete:
            return False
        self.loop.call_later(HALF_CLOSE_GRACE_S, self.transport.close)
        return True


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the process drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to us."""
        yield


def server_for(app: RouterApp) -> Server:
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
