"""Streams to readers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deepseek_tgi.router import sse


class DeafExchange:
    """Takes the first chunk; every later write waits for a reader that does not come."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.comment = asyncio.Event()

    async def start_stream(self, headers: Any) -> None:
        pass

    async def write(self, chunk: bytes) -> None:
        self.writes.append(chunk)
        if chunk == sse.KEEP_ALIVE:
            self.comment.set()
            await asyncio.Event().wait()


async def silence() -> AsyncGenerator[bytes, None]:
    yield b"first"
    await asyncio.Event().wait()


async def test_comments_do_not_pile_up_before_a_reader_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.005)
    exchange: Any = DeafExchange()
    streaming = asyncio.create_task(sse.stream(exchange, silence(), []))
    await asyncio.wait_for(exchange.comment.wait(), 10)
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert exchange.writes == [b"first", sse.KEEP_ALIVE]
    streaming.cancel()
    await asyncio.wait({streaming})
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "the comment is given up with its stream"
