"""Changing the served model while clients talk to it: what is done, in which order, and what remains if it fails.

The plan, in this order, and said in the answer and the log:
- *beside*: the new model loads beside the one that serves. From one instant on new requests go to it; what runs ends
  on the old one, which is then unloaded.
- *shrink*: memory was short. The old model gives back the free pages of its cache and serves on with the rest; then
  as *beside*.
- *drain*: it was short still (or there are several ranks). New requests wait, what runs ends, the old model is
  unloaded, the new one loaded; then those that wait go to it. If that load fails the old one is loaded again.
Whatever fails, one model serves at the end, or the error says that none does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from deepseek_tgi.errors import DeepseekTgiError, ResourceError
from deepseek_tgi.router.change import Change, Wish, is_plain
from deepseek_tgi.router.control import ControlClient
from deepseek_tgi.router.errors import ModelChangeError
from deepseek_tgi.router.loads import ModelLoads
from deepseek_tgi.router.models import NOTHING_LOADED, Models
from deepseek_tgi.router.served_model import ServedModel, Shared

logger = logging.getLogger(__name__)

KEPT_CHANGES = 20


class ModelChanges:
    """Owner of what goes on; one change at a time. Used on the event loop."""

    def __init__(self, shared: Shared, models: Models, control: ControlClient, generation: int) -> None:
        """`generation` is the first model's."""
        self.models = models
        self.history: list[Change] = []
        self.asleep: ServedModel | None = None
        self._shared = shared
        self._control = control
        self._loads = ModelLoads(shared, models, control, generation, self._told)
        self.repository = self._loads.repository
        self._running: Change | None = None
        self._moved = asyncio.Event()
        self._tasks: set[asyncio.Task[Change]] = set()

    @property
    def running(self) -> Change | None:
        """What goes on now."""
        return self._running

    async def serves(self, wish: Wish) -> bool:
        """True if the wish has come true: this model takes the requests, and neither revision nor files are others."""
        model = self.models.open
        if model is None or self._running is not None or wish.model_id != model.name or not is_plain(wish):
            return False
        return wish.revision in {None, model.state.config.revision} and await self._loads.unchanged(model)

    async def load(self, wish: Wish) -> Change:
        """Serve another model. Raises `ModelChangeError` with the reason; what served before still does, or it says."""
        async with self._change("load", wish.model_id) as change:
            if self.asleep is not None:
                if await self._beside_sleeper(wish, change, self.asleep):
                    return change
                await self._forget_sleeper()
            old = self.models.current
            if old is None:
                change.plan = "empty"
                await self._load_held(wish, change)
            elif wish.plan == "drain" or (self._control.world_size > 1 and wish.plan == "auto"):
                await self._drained(wish, change, old)
            else:
                await self._beside(wish, change, old)
        return change

    async def unload(self, name: str | None = None) -> Change:
        """Serve nothing: new requests are refused, what runs ends, the memory is given back."""
        async with self._change("unload", name or "") as change:
            if self.asleep is not None:
                change.model = self.asleep.name
                await self._forget_sleeper()
                return change
            model = self._named(name)
            change.model = model.name
            self.models.refuse(NOTHING_LOADED)
            await self._loads.until_idle(model, change)
            await self._loads.gone(model)
        return change

    async def sleep(self, drop_weights: bool, keep_pages: bool = False) -> Change:
        """Give memory back until `wake`; new requests are refused meanwhile. If that cannot be, the model serves on.

        Weights leave their device for the host's memory, or for good if dropped; pages go unless they are kept.
        """
        async with self._change("sleep", "") as change:
            model = self._named(None)
            change.model = model.name
            if self.asleep is not None:
                raise ModelChangeError(f"{model.name} sleeps already")
            self.models.refuse(f"{model.name} sleeps")
            await self._loads.until_idle(model, change)
            assert model.generation is not None
            try:
                await self._control.sleep(model.generation, drop_weights, keep_pages)
            except DeepseekTgiError:
                self.models.resume()
                raise
            self.asleep = model
            self.models.state.sleeps()
        return change

    async def wake(self) -> Change:
        """Let the model that sleeps take requests again; those that come meanwhile wait."""
        async with self._change("wake", "") as change:
            model = self.asleep
            if model is None or model.generation is None:
                raise ModelChangeError("no model sleeps")
            change.model = model.name
            self.models.hold()
            started = time.monotonic()
            try:
                await self._control.wake(model.generation, self._told(change))
            except DeepseekTgiError:
                self.models.refuse(f"{model.name} sleeps, and could not be woken")
                raise
            self.asleep = None
            self.models.resume()
            change.pause_s = time.monotonic() - started
        return change

    def start(self, work: Coroutine[Any, Any, Change]) -> asyncio.Task[Change]:
        """Begin a change that goes on if whoever asked for it leaves."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def started(self, work: Coroutine[Any, Any, Change]) -> Change:
        """A change, to its end; it goes on if the caller is cancelled."""
        return await asyncio.shield(self.start(work))

    def _finished(self, task: asyncio.Task[Change]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever asked, and in the history

    async def follow(self, change: Change) -> AsyncIterator[Change]:
        """The change whenever it has moved, and when it is over."""
        seen = -1
        while True:
            moved = self._moved
            if change.steps != seen:
                seen = change.steps
                yield change
            if change.state != "running":
                return
            await moved.wait()

    async def close(self) -> None:
        """Give up what goes on."""
        tasks: list[asyncio.Task[Any]] = [*self._loads.leaving, *self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- plans ------------------------------------------------------------------------------------------------------

    async def _beside(self, wish: Wish, change: Change, old: ServedModel) -> None:
        change.plan = "beside"
        try:
            await self._loads.publish(await self._loads.loaded(wish, change), change)
        except ModelChangeError as error:
            if error.kind is not ResourceError or wish.plan != "auto":
                raise
            logger.warning("%s: %s; the cache of %s is shrunk", wish.model_id, error, old.name)
            if not await self._beside_shrunk(wish, change, old):
                await self._drained(wish, change, old)
                return
        self._loads.retire(old)

    async def _beside_shrunk(self, wish: Wish, change: Change, old: ServedModel) -> bool:
        """Once more, with what the old model's cache has free; false if memory is short still."""
        change.plan = "shrink"
        withheld = await self._loads.shrink(old)
        try:
            await self._loads.publish(await self._loads.loaded(wish, change), change)
        except BaseException as error:
            await self._loads.grow(old, withheld)
            if not isinstance(error, ModelChangeError) or error.kind is not ResourceError:
                raise
            logger.warning("%s: %s; %s is drained first", wish.model_id, error, old.name)
            return False
        return True

    async def _beside_sleeper(self, wish: Wish, change: Change, sleeper: ServedModel) -> bool:
        """Load while another model sleeps, which can still be woken if this fails; false if it must go first.

        Requests are refused, as before, until the new model takes them.
        """
        if wish.plan == "drain" or self._control.world_size > 1:
            return False
        change.plan = "beside"
        try:
            await self._loads.publish(await self._loads.loaded(wish, change), change)
        except ModelChangeError as error:
            if error.kind is not ResourceError or wish.plan != "auto":
                raise
            logger.warning("%s: %s; %s, which sleeps, is unloaded first", wish.model_id, error, sleeper.name)
            return False
        self.asleep = None
        self._loads.retire(sleeper)
        return True

    async def _drained(self, wish: Wish, change: Change, old: ServedModel) -> None:
        change.plan = "drain"
        before = Wish(old.state.config.tokenizer_name, old.state.config.revision)
        self.models.hold()
        started = time.monotonic()
        try:
            await self._loads.until_idle(old, change)
        except ModelChangeError:
            self.models.resume()
            raise
        try:
            await self._loads.gone(old)
            await self._loads.publish(await self._loads.loaded(wish, change), change)
        except DeepseekTgiError as error:
            logger.error("%s: %s; %s is loaded again", wish.model_id, error, old.name)
            try:
                await self._loads.publish(await self._loads.loaded(before, change, old.state.config), change)
            except DeepseekTgiError as worse:
                self.models.refuse(NOTHING_LOADED)
                raise ModelChangeError(
                    f"{error}; {old.name} could not be loaded again: {worse}; none serves"
                ) from worse
            raise ModelChangeError(f"{error}; {old.name} was loaded again and serves") from error
        finally:
            change.pause_s = time.monotonic() - started

    async def _load_held(self, wish: Wish, change: Change) -> None:
        """Load where nothing serves; requests that come meanwhile wait."""
        self.models.hold()
        started = time.monotonic()
        try:
            await self._loads.publish(await self._loads.loaded(wish, change), change)
        except BaseException:
            self.models.refuse(NOTHING_LOADED)
            raise
        change.pause_s = time.monotonic() - started

    async def _forget_sleeper(self) -> None:
        model, self.asleep = self.asleep, None
        assert model is not None
        await self._loads.gone(model)
        self.models.refuse(NOTHING_LOADED)

    def _named(self, name: str | None) -> ServedModel:
        model = self.models.current
        if model is None or (name is not None and name != model.name):
            wanted = "" if name is None else f"{name} is not served; "
            raise ModelChangeError(f"{wanted}{'no model is served' if model is None else f'{model.name} is'}")
        if model.generation is None:
            raise ModelChangeError("these shards cannot change their model")
        return model

    def _told(self, change: Change) -> Callable[[str, float], None]:
        def told(stage: str, percent: float) -> None:
            change.stage, change.percent = stage, percent
            self.models.state.is_loading(stage, percent)
            self._move(change)

        return told

    def _move(self, change: Change) -> None:
        change.steps += 1
        self._moved.set()
        self._moved = asyncio.Event()

    @asynccontextmanager
    async def _change(self, kind: str, model: str) -> AsyncIterator[Change]:
        """One at a time. It is over, and another may begin, from the instant that clients get the new model."""
        if self._running is not None:
            under_way = self._running.said
            raise ModelChangeError(f"refused: {under_way} is under way; one at a time, ask again when it is over")
        if self._shared.traffic.draining:
            raise ModelChangeError("refused: the server is shutting down")
        change = self._running = Change(kind, model)
        self.history = [*self.history[1 - KEPT_CHANGES :], change]
        started = time.monotonic()
        try:
            yield change
            change.state = "done"
        except DeepseekTgiError as error:
            change.state, change.error = "failed", str(error)
            logger.error("%s %s failed: %s", kind, change.model, error)
            raise
        except BaseException as error:
            change.state, change.error = "failed", str(error) or type(error).__name__
            raise
        finally:
            change.seconds = time.monotonic() - started
            self._running = None
            self._move(change)
