"""Server-sent events: the bytes of a stream, its keep-alive, and how errors are told inside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson

from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.router.errors import IncompleteGenerationError, IncompleteStreamError
from deepseek_tgi.router.http import Exchange

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def in_stream(error: DeepseekTgiError) -> DeepseekTgiError:
    """The error as a stream tells it."""
    return IncompleteStreamError() if isinstance(error, IncompleteGenerationError) else error


def native_error(error: DeepseekTgiError) -> bytes:
    """The last event of a native stream that failed."""
    error = in_stream(error)
    return event({"error": str(error), "error_type": error.error_type})


def openai_error(error: DeepseekTgiError) -> bytes:
    """The last event before `[DONE]` of an OpenAI stream that failed; the code is 422 whatever the cause."""
    return event({"error": {"message": str(in_stream(error)), "http_status_code": 422}})


async def openai_stream(
    chunks: AsyncGenerator[bytes, None], note_failed: Callable[[DeepseekTgiError], None]
) -> AsyncGenerator[bytes, None]:
    """`chunks`, an error told inside the stream, and `[DONE]`."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except DeepseekTgiError as error:
            note_failed(error)
            yield openai_error(error)
    yield DONE


class _KeepAlive:
    """Writes a comment after each `KEEP_ALIVE_S` of silence, unless the last one has not left yet.

    One timer a stream, none a token.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._write: asyncio.Task[None] | None = None
        self.last_sent = self._loop.time()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._fire)

    def cancel(self) -> None:
        """Stop."""
        self._timer.cancel()
        if self._write is not None:
            self._write.cancel()

    def sent(self) -> None:
        """Something was written."""
        self.last_sent = self._loop.time()

    def _fire(self) -> None:
        now = self._loop.time()
        if now >= self.last_sent + KEEP_ALIVE_S:
            self.last_sent = now
            if self._write is None or self._write.done():
                self._write = self._loop.create_task(self._exchange.write(KEEP_ALIVE))
        self._timer = self._loop.call_at(self.last_sent + KEEP_ALIVE_S, self._fire)


async def stream(exchange: Exchange, chunks: AsyncGenerator[bytes, None], headers: list[tuple[str, str]]) -> None:
    """Write `chunks` as they come."""
    await exchange.start_stream(headers)
    keep_alive = _KeepAlive(exchange)
    try:
        async with aclosing(chunks):  # a client that leaves ends the generation at once, not when memory is collected
            async for chunk in chunks:
                await exchange.write(chunk)
                keep_alive.sent()
    finally:
        keep_alive.cancel()
    await exchange.end_stream()
