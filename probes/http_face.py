"""A port for probes alone, with a thread and an event loop of its own: it answers whatever the main port is doing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus

from deepseek_tgi.probes.kubernetes import CONTENT_TYPE, Answer
from deepseek_tgi.probes.kubernetes import answer as kubernetes_answer
from deepseek_tgi.probes.owner import Owner

MAX_HEAD_BYTES = 8192
IDLE_S = 30.0
"""A connection that says nothing for this long is closed."""
MAX_CONNECTIONS = 256
"""Above this the one that has been silent longest makes room: whoever holds connections open must not shut us off."""
CLOSE_S = 2.0

Ask = Callable[[str, str], "Answer | None"]


def asker_of(owner: Owner) -> Ask:
    """What the port answers for one owner."""
    return lambda path, query: kubernetes_answer(path, query, owner.current)


class ProbePort:
    """Serves `ask(path, query)` on a port until `stop`."""

    def __init__(self, ask: Ask, hostname: str, port: int) -> None:
        """Binds. Raises `OSError` if the address cannot be had."""
        self._ask = ask
        family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
        self._listener = socket.create_server((hostname, port), family=family)
        self._silent: dict[asyncio.Task[None], None] = {}
        self._open = 0
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="probe port", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        number: int = self._listener.getsockname()[1]
        return number

    def stop(self) -> None:
        """Close the port and end the thread; safe to call twice."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, sock=self._listener, limit=MAX_HEAD_BYTES)
        await self._stopped.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_S / 2)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        if self._open > MAX_CONNECTIONS and self._silent:
            next(iter(self._silent)).cancel()
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError, asyncio.CancelledError):
            return  # nobody is left to be told
        finally:
            self._open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; true if the connection may be used for another."""
        task = asyncio.current_task()
        assert task is not None
        self._silent[task] = None
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE_S)
        finally:
            self._silent.pop(task, None)
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if len(words) != 3:
            writer.write(_message(Answer(400, "expected a request line of HTTP/1.1\n"), False, True))
            return False
        method, target, version = words
        path, _, query = target.partition("?")
        # A body would be taken for the next request.
        last = version == "HTTP/1.0" or fields.get("connection", "").lower() == "close" or bool(_body_of(fields))
        writer.write(_message(self._answer(method, path, query), last, method != "HEAD"))
        await writer.drain()
        return not last

    def _answer(self, method: str, path: str, query: str) -> Answer:
        found = self._ask(path, query)
        if found is None:
            return Answer(404, "expected /livez, /readyz or /startupz\n")
        return found if method in {"GET", "HEAD"} else Answer(405, "expected GET\n")


def _body_of(fields: dict[str, str]) -> str | None:
    return fields.get("transfer-encoding") or (fields.get("content-length", "0").strip("0") or None)


def _message(found: Answer, last: bool, with_body: bool) -> bytes:
    body = found.text.encode()
    lines = [
        f"HTTP/1.1 {found.status} {HTTPStatus(found.status).phrase}",
        f"content-type: {CONTENT_TYPE}",
        f"content-length: {len(body)}",
        "cache-control: no-cache, private",
        *(["connection: close"] if last else []),
    ]
    head = "\r\n".join(lines) + "\r\n\r\n"
    return head.encode() + (body if with_body else b"")
