"""Which model a request gets: the one owner of that choice, and of the requests that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deepseek_tgi.errors import DeepseekTgiError, NotReadyError, OverloadedError
from deepseek_tgi.router.http import Exchange, Handler
from deepseek_tgi.router.model_state import ModelState
from deepseek_tgi.router.served_model import ServedModel

NOTHING_LOADED = "No model is loaded"


class Models:
    """Owner of the served model and of the tasks that batch for it and for those it follows. Used on the event loop.

    `open` is the model that takes a request this instant, None if none does; the hot path reads only that. While it is
    held back new requests wait, `hold_seconds` at most and `most_held` of them.
    """

    def __init__(self, first: ServedModel, hold_seconds: float, most_held: int, state: ModelState) -> None:
        self.state = state
        self.current: ServedModel | None = first
        self.open: ServedModel | None = first
        self.held = 0
        self._hold_seconds = hold_seconds
        self._most_held = most_held
        self._refusal: str | None = None
        self._settled = asyncio.Event()
        self._tasks: dict[ServedModel, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[None] | None = None
        self._leaving: set[ServedModel] = set()

    @property
    def reason(self) -> str:
        """Why no model takes requests now, empty if one does."""
        if self.open is not None:
            return ""
        return "being changed" if self._refusal is None else self._refusal

    def publish(self, model: ServedModel) -> None:
        """From this instant on every new request, and every one that waits, gets `model`."""
        self.start(model)
        self.state.serves(model.name, model.generation)
        self.current = self.open = model
        self._refusal = None
        self._settle()

    def hold(self) -> None:
        """From this instant on new requests wait for what is published, or refused, next."""
        self.state.waits()
        self.open = None
        self._refusal = None
        self._settled.clear()

    def resume(self) -> None:
        """The current model takes requests again, those that wait first."""
        if self.current is None:
            self.refuse(NOTHING_LOADED)
            return
        self.state.serves(self.current.name, self.current.generation)
        self.open = self.current
        self._settle()

    def refuse(self, reason: str) -> None:
        """From this instant on new requests, and those that wait, are refused (503)."""
        self.state.refuses(reason)
        self.open = None
        self._refusal = reason
        self._settle()

    def _settle(self) -> None:
        self._settled.set()

    async def admitted(self) -> ServedModel:
        """The model for a new request, waited for if that must be.

        Raises: `NotReadyError` if there is none or it takes too long, `OverloadedError` if too many wait already.
        """
        model = self.open
        if model is not None:
            return model
        if self._refusal is None and self.held >= self._most_held:
            raise OverloadedError("Model is overloaded")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._hold_seconds
        self.held += 1
        try:
            while model is None:
                if self._refusal is not None:
                    # A new one each time: an error that is raised again keeps the frames of all who met it.
                    raise NotReadyError(self._refusal)
                await asyncio.wait_for(self._settled.wait(), deadline - loop.time())
                model = self.open
        except (asyncio.TimeoutError, TimeoutError):
            raise NotReadyError(f"The model is still being changed after {self._hold_seconds:g} s") from None
        finally:
            self.held -= 1
        return model

    def handler(self, key: tuple[str, str]) -> Handler:
        """The handler of a route that belongs to whichever model serves."""

        async def handle(exchange: Exchange) -> None:
            model = self.open or await self.admitted()
            with model.traffic.request():
                await model.handlers[key](exchange)

        return handle

    def showing(self, key: tuple[str, str]) -> Handler:
        """As `handler`, of a route that only tells facts: it never waits."""

        async def handle(exchange: Exchange) -> None:
            if self.current is None:
                raise NotReadyError(NOTHING_LOADED)
            await self.current.handlers[key](exchange)

        return handle

    # --- batching ---------------------------------------------------------------------------------------------------

    def start(self, model: ServedModel) -> None:
        """Batch for `model` from now on."""
        if model in self._tasks:
            return
        task = asyncio.create_task(model.scheduler.run(), name=f"batching {model.name}")
        self._tasks[model] = task
        task.add_done_callback(lambda done: self._over(model, done))

    def drop(self, model: ServedModel) -> None:
        """Batch for `model` no more; nothing of it may be running."""
        self._leaving.add(model)
        if self.current is model:
            self.current = self.open = None
            self.state.gone()
        task = self._tasks.pop(model, None)
        if task is not None:
            task.cancel()
        model.close()

    async def run(self) -> None:
        """Batch for the current model and its followers until cancelled; raises if a batching task ends."""
        self._ended = asyncio.get_running_loop().create_future()
        if self.current is not None:
            self.start(self.current)
        try:
            await self._ended
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def end_all(self, error: DeepseekTgiError) -> None:
        """End every request of every model, and those that wait, with an error."""
        self.each(lambda model: model.scheduler.end_all(error))
        if self.held:
            self.refuse(str(error))

    def each(self, act: Callable[[ServedModel], None]) -> None:
        """For all models that are served or still finish."""
        for model in list(self._tasks):
            act(model)

    def close(self) -> None:
        """Stop the threads of all models."""
        self.each(ServedModel.close)
        if self.current is not None:
            self.current.close()

    def _over(self, model: ServedModel, task: asyncio.Task[None]) -> None:
        self._tasks.pop(model, None)
        if model in self._leaving:
            self._leaving.discard(model)
            return
        if self._ended is None or self._ended.done():
            return
        error = None if task.cancelled() else task.exception()
        self._ended.set_exception(error or RuntimeError(f"the batching task of {model.name} ended on its own"))
