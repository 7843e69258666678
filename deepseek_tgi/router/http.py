"""The little HTTP this door needs, straight on ASGI: one request and its answer, and a table of routes.

Choice: raw ASGI. A framework's response and streaming classes cost a third of the door's throughput (measured: 122,000
against 92,000 events a second on one core), and every status, empty body and plain-text error is fixed by TGI anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias

import orjson

from deepseek_tgi.router.errors import PlainError
from deepseek_tgi.router.fields import parse_json

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = Iterable[tuple[str, str]]

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"
LARGE_BODY_BYTES = 64 * 1024
"""Bodies above this are parsed on a thread, so that the event loop keeps its pace."""


class Exchange:
    """One request and its answer. `started` tells whether the status line is out, `gone` whether the client left.

    From the moment the body is read, a client that leaves cancels the task that handles its request.
    """

    __slots__ = (
        "_headers",
        "_receive",
        "_send",
        "_watch",
        "extra_headers",
        "gone",
        "method",
        "path",
        "query",
        "started",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.started = False
        self.gone = False
        self._watch: asyncio.Task[None] | None = None
        self.extra_headers: list[tuple[bytes, bytes]] = []

    def header(self, name: str) -> str | None:
        """A request header, name in lower case."""
        wanted = name.encode("ascii")
        return next((value.decode("latin-1") for key, value in self._headers if key == wanted), None)

    async def json(self, limit_bytes: int, *, optional: bool = False) -> Any:
        """The body as JSON; where it is optional, `{}` for none. Raises `PlainError`: 415, 413 or 400."""
        kind = (self.header("content-type") or "").split(";")[0].strip().lower()
        body = await self._body(limit_bytes) if optional else None
        if body == b"":
            return {}
        if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
            raise PlainError(415, "Expected request with `Content-Type: application/json`")
        if body is None:
            body = await self._body(limit_bytes)
        self._watch = asyncio.create_task(self._cancel_when_gone(asyncio.current_task()))
        if len(body) > LARGE_BODY_BYTES:
            return await asyncio.to_thread(parse_json, body)
        return parse_json(body)

    async def _body(self, limit_bytes: int) -> bytes:
        """The whole body, read no further than the limit."""
        too_long = PlainError(413, "Failed to buffer the request body: length limit exceeded")
        declared = self.header("content-length")
        if declared is not None and declared.isdecimal() and int(declared) > limit_bytes:
            raise too_long
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise asyncio.CancelledError
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit_bytes:
                self.extra_headers.append((b"connection", b"close"))
                raise too_long
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    async def _cancel_when_gone(self, handler: asyncio.Task[Any] | None) -> None:
        """Cancel the handler once the client has closed the connection: nobody waits for its answer."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if handler is not None:
            handler.cancel()

    def close(self) -> None:
        """Stop watching the connection."""
        if self._watch is not None:
            self._watch.cancel()

    async def respond(self, status: int, body: bytes = b"", content_type: str = "", headers: Headers = ()) -> None:
        """A whole answer."""
        extra = [("content-type", content_type)] if content_type else []
        await self._start(status, [*extra, ("content-length", str(len(body))), *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(self, status: int, value: Any, headers: Headers = ()) -> None:
        """A whole JSON answer."""
        await self.respond(status, orjson.dumps(value), JSON, headers)

    async def start_stream(self, headers: Headers = ()) -> None:
        """Status 200 and the headers of an event stream."""
        fixed = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
        await self._start(200, [*fixed, *headers])

    async def write(self, chunk: bytes) -> None:
        """Part of a stream; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_stream(self) -> None:
        """The end of a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        encoded = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": [*encoded, *self.extra_headers]})


Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


class Routes:
    """Path and method to handler."""

    def __init__(self, table: Mapping[tuple[str, str], Handler]) -> None:
        self._table = dict(table)
        self._paths = {path for _, path in table}

    def find(self, method: str, path: str) -> Handler:
        """The handler. Raises `PlainError` 404 or 405, both with an empty body."""
        handler = self._table.get(("GET" if method == "HEAD" else method, path))
        if handler is None:
            raise PlainError(405 if path in self._paths else 404)
        return handler


class Cors:
    """Which pages may read the answers: GET and POST with a content-type header, from the given origins or any."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        """What every answer carries."""
        vary = (b"vary", b"origin, access-control-request-method, access-control-request-headers")
        if not self._origins:
            return [vary, (b"access-control-allow-origin", b"*")]
        if origin in self._origins and origin is not None:
            return [vary, (b"access-control-allow-origin", origin.encode("latin-1"))]
        return [vary]

    @staticmethod
    def preflight() -> list[tuple[str, str]]:
        """What the answer to a preflight carries besides."""
        return [("access-control-allow-methods", "GET,POST"), ("access-control-allow-headers", "content-type")]
