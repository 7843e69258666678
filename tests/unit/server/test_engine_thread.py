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


async def test_spare_work_is_done_piece_by_piece_until_none_is_left() -> None:
    thread, finished = EngineThread(), asyncio.Event()
    loop = asyncio.get_running_loop()
    pieces: list[str] = []

    def piece() -> bool:
        pieces.append(threading.current_thread().name)
        if len(pieces) == 3:
            loop.call_soon_threadsafe(finished.set)
        return len(pieces) < 3

    thread.while_idle(piece, idle_s=0)
    await asyncio.wait_for(finished.wait(), 10)
    await thread.run(lambda: None)
    assert len(pieces) == 3
    assert pieces[0].startswith("engine"), "where calls run, so that none runs beside it"
    thread.close()


async def test_spare_work_waits_for_calls_and_gives_up_on_an_error(caplog: pytest.LogCaptureFixture) -> None:
    thread, gate, tried = EngineThread(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    order: list[str] = []

    def piece() -> bool:
        order.append("spare")
        loop.call_soon_threadsafe(tried.set)
        raise ValueError("no memory")

    def wait() -> None:
        gate.wait()
        order.append("call")

    call = asyncio.ensure_future(thread.run(wait))
    await asyncio.sleep(0)
    thread.while_idle(piece, idle_s=0)
    for _ in range(5):
        await asyncio.sleep(0)
    gate.set()
    await call
    await asyncio.wait_for(tried.wait(), 10)
    await thread.run(lambda: None)
    await asyncio.sleep(0)
    assert order == ["call", "spare"]
    assert "it is given up" in caplog.text
    thread.close()
