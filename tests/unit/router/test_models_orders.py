"""Every short order in which a loader, requests and the end of them can meet, over the real owner of the choice.

What must hold whatever the order: a request that is let in has one model, which was the one to take it at that instant;
one that waits is let in or refused once and never forgotten; the flag of the hot path, the state and what a probe reads
agree at every moment; and nothing is ready while no model takes requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.probes.grpc_health import Directory
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event
from deepseek_tgi.router.model_state import ModelState
from deepseek_tgi.router.models import Models
from deepseek_tgi.router.served_model import ServedModel
from deepseek_tgi.router.traffic import Traffic

TURNS = 8
"""Turns of the event loop in which whoever can go on has gone on."""


class Idle:
    """A scheduler with nothing to do."""

    async def run(self) -> None:
        await asyncio.Event().wait()


@dataclass(eq=False)
class Model:
    """What the owner needs of a served model."""

    name: str
    generation: int
    scheduler: Idle = field(default_factory=Idle)
    traffic: Traffic = field(default_factory=Traffic)
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Request:
    """One client: the model it was let in to, or the error it got."""

    task: asyncio.Task[None]
    model: Model | None = None
    error: str = ""
    ends: int = 0


class World:
    """The real `Models` and `Owner`, and the loader's moves that the order names."""

    MOVES = ("ask", "hold", "publish", "resume", "refuse", "drop", "look")

    def __init__(self) -> None:
        self.owner = Owner()
        for event in (Event.LOAD, Event.LOADED, Event.WARMED):
            self.owner.apply(event)
        self.models_made = [Model("m1", 1)]
        directory = Directory(self.owner)
        first = cast(ServedModel, self.models_made[0])
        self.models = Models(first, 30.0, 100, ModelState(self.owner, directory, "m1"))
        self.requests: list[Request] = []

    async def move(self, name: str) -> None:
        getattr(self, name)()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.check()

    def ask(self) -> None:
        request = Request(asyncio.get_running_loop().create_task(self._asked(len(self.requests))))
        self.requests.append(request)

    async def _asked(self, number: int) -> None:
        try:
            model = cast(Model, self.models.open or await self.models.admitted())
        except DeepseekTgiError as error:
            self._end(number).error = str(error)
            return
        request = self._end(number)
        request.model = model
        assert model is cast(Any, self.models.open), "let in to a model that takes no requests at that instant"
        assert not model.closed

    def _end(self, number: int) -> Request:
        request = self.requests[number]
        request.ends += 1
        return request

    def hold(self) -> None:
        self.models.hold()

    def publish(self) -> None:
        made = Model(f"m{len(self.models_made) + 1}", len(self.models_made) + 1)
        self.models_made.append(made)
        self.models.publish(cast(ServedModel, made))

    def resume(self) -> None:
        self.models.resume()

    def refuse(self) -> None:
        self.models.refuse("no")

    def drop(self) -> None:
        """Give the served model up, as a loader does once it is idle and takes no requests."""
        current = self.models.current
        if current is not None and self.models.open is None:
            self.models.drop(current)

    def look(self) -> None:
        """A probe, which `check` is after every move anyway."""

    def check(self) -> None:
        report, takes = self.owner.current.report, self.models.open is not None
        assert report.admits == takes, f"the flag says {takes}, the state {self.owner.state}"
        assert report.ready == takes
        if takes:
            assert self.owner.current.facts.model in {None, self.models.open.name}  # type: ignore[union-attr]
        for request in self.requests:
            assert request.ends <= 1
            assert request.ends == request.task.done()
        waiting = sum(not request.task.done() for request in self.requests)
        assert waiting == self.models.held, "a request that waits is not counted, or one that ended is"
        if takes:
            assert waiting == 0, "a request waits although a model takes requests"

    async def close(self) -> None:
        """The loader comes to its end, and with it every request."""
        self.publish()
        for request in self.requests:
            await asyncio.wait_for(request.task, 1)
            assert request.ends == 1
            assert (request.model is None) != (request.error == "")
        self.models.each(self.models.drop)
        await asyncio.sleep(0)


async def lived(order: Sequence[str]) -> None:
    world = World()
    try:
        for name in order:
            await world.move(name)
        await world.close()
    except AssertionError as error:
        raise AssertionError(f"{' '.join(order)}: {error}") from error


async def test_every_order_of_five_moves() -> None:
    orders = 0
    for order in itertools.product(World.MOVES[:-1], repeat=5):
        await lived(order)
        orders += 1
    assert orders == 6**5


@pytest.mark.parametrize("seed", range(4))
async def test_long_random_orders(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        await lived(chance.choices(World.MOVES, weights=(5, 1, 1, 1, 1, 1, 1), k=120))
