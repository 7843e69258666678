"""The engine's thread: order, and callers that go away."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deepseek_tgi.server.engine_thread import EngineThread


async def test_a_waiting_call_runs_although_its_caller_left() -> None:
    thread, gate, done = EngineThread(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    first = asyncio.ensure_future(thread.run(gate.wait))
    left = asyncio.ensure_future(thread.run(lambda: loop.call_soon_threadsafe(done.set)))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    before = thread.idle
    gate.set()
    await asyncio.wait_for(asyncio.gather(first, done.wait()), 10)
    await thread.run(lambda: None)
    await asyncio.sleep(0)
    assert (before, thread.idle) == (False, True)
    thread.close()
