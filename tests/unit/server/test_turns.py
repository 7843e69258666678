"""Calls that all ranks run: in rank 0's order, whatever order they come in."""

from __future__ import annotations

import asyncio
import queue

import pytest

from deepseek_tgi.errors import DeviceError
from deepseek_tgi.server.engine_thread import EngineThread
from deepseek_tgi.server.turns import Turns, call_number


class Follower:
    """A rank that is told whose turn it is, and notes what it ran."""

    def __init__(self) -> None:
        self.told: queue.Queue[int] = queue.Queue()
        self.ran: list[int] = []
        self.thread = EngineThread()
        self.turns = Turns(self.thread, lambda _: self.told.get(timeout=10), 2)

    def call(self, number: int) -> asyncio.Future[int]:
        def work() -> int:
            self.ran.append(number)
            return number

        return asyncio.ensure_future(self.turns.run(number, work))


async def test_calls_run_in_the_order_of_rank_0() -> None:
    rank = Follower()
    calls = [rank.call(number) for number in (1, 2, 3, 4)]
    for number in (3, 1, 4, 2):
        rank.told.put(number)
    assert await asyncio.wait_for(asyncio.gather(*calls), 10) == [1, 2, 3, 4]
    assert rank.ran == [3, 1, 4, 2]
    rank.thread.close()


async def test_a_call_that_came_too_early_waits_for_one_that_is_late() -> None:
    rank = Follower()
    early = rank.call(1)
    rank.told.put(2)
    while not rank.thread.idle:
        await asyncio.sleep(0.001)
    assert not early.done()
    assert await asyncio.wait_for(rank.call(2), 10) == 2
    rank.told.put(1)
    assert await asyncio.wait_for(early, 10) == 1
    assert rank.ran == [2, 1]
    rank.thread.close()


async def test_a_call_whose_caller_left_still_takes_its_turn() -> None:
    rank = Follower()
    left = rank.call(1)
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    rank.told.put(2)
    rank.told.put(1)
    assert await asyncio.wait_for(rank.call(2), 10) == 2
    while rank.ran != [2, 1]:
        await asyncio.sleep(0.001)
    rank.thread.close()


async def test_errors_of_a_call_and_of_the_other_ranks_reach_its_caller() -> None:
    thread = EngineThread()

    def lost(number: int) -> int:
        if number == 2:
            raise DeviceError("rank 0 is gone")
        return number

    turns = Turns(thread, lost, 2)
    with pytest.raises(ZeroDivisionError):
        await turns.run(1, lambda: 1 // 0)
    with pytest.raises(DeviceError, match="rank 0 is gone"):
        await turns.run(2, lambda: pytest.fail("ran"))
    assert await turns.run(3, lambda: "next") == "next"
    thread.close()


async def test_a_single_rank_asks_nobody() -> None:
    thread = EngineThread()
    assert await Turns(thread, lambda _: pytest.fail("asked"), 1).run(1, lambda: 7) == 7
    thread.close()


def test_numbers_tell_calls_apart_and_are_the_same_in_every_process() -> None:
    numbers = [
        call_number("Prefill", 3, 1, 2),
        call_number("Prefill", 3, 12),
        call_number("Decode", 3),
        call_number("W"),
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 2**63 for number in numbers)
    assert call_number("Decode", 0, 2**64 - 1) == 2948670862429083966
