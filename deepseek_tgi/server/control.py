"""Loading, publishing and unloading models of this shard: `ModelControl`, on the socket beside TGI's eight calls."""

# ruff: noqa: N802 - the methods carry the wire's names

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from deepseek_tgi.engine.memory import memory_of
from deepseek_tgi.errors import ConfigError, NotReadyError, RequestError
from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.pb import control_pb2_grpc
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State
from deepseek_tgi.server.compatible import check_compatible
from deepseek_tgi.server.control_messages import demand_of, loaded_pb, source_of, status_pb
from deepseek_tgi.server.engine_api import EngineApi
from deepseek_tgi.server.freeing import giving_back, trim
from deepseek_tgi.server.interceptors import status_of
from deepseek_tgi.server.loader import Loaded, Loading, Recipe
from deepseek_tgi.server.models import Demand, Held, Models, Source
from deepseek_tgi.server.service import ShardService, held_model
from deepseek_tgi.server.turns import Turns
from deepseek_tgi.server.watch import WatchCalls

logger = logging.getLogger(__name__)

CONTROL = "deepseek_tgi.control.v1.ModelControl"
RETIRE_POLL_S = 0.05
TURN_S, LEFT_S = 2.0, 60.0
"""How long a change waits for one that ends (its caller may be gone), and for what a given up load still does."""


def _answered(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A unary call whose errors become statuses."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001 - the mapper of these calls
            await refuse(method.__name__, context, error)

    return call


def _streamed(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """A streaming call whose errors become statuses."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in method(self, request, context):
                yield answer
        except Exception as error:  # noqa: BLE001 - the mapper of these calls
            await refuse(method.__name__, context, error)

    return call


async def refuse(method: str, context: Any, error: Exception) -> None:
    """End a call with the status of `error`."""
    code, message = status_of(error)
    logger.error("%s failed: %s: %s", method, code.name, message)
    await context.abort(code, message)


class ControlService(control_pb2_grpc.ModelControlServicer):
    """One load (or sleep, or waking) at a time; another that is asked for meanwhile is refused."""

    def __init__(self, recipe: Recipe, models: Models, service: ShardService, state: Owner, watch: WatchCalls) -> None:
        self._recipe = recipe
        self._models = models
        self._service = service
        self._thread = service.thread
        self._state = state
        self._watch = watch
        self._device = models.of(None).info.device_type
        self._change: str | None = None
        self._free = asyncio.Event()
        self._free.set()
        self._last: Loading | None = None
        self._progress = ("", 0.0)
        self._retiring: set[asyncio.Task[None]] = set()

    @_streamed
    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Increment]:
        """See `WatchCalls`."""
        async for increment in self._watch.Watch(request, context):
            yield increment

    @_streamed
    async def Load(self, request: pb.LoadRequest, context: Any) -> AsyncIterator[pb.LoadProgress]:
        """Load a model beside the others; the last answer tells what it is."""
        source = source_of(request.source)
        generation = request.generation
        if request.compatible and self._watch.followers:
            raise ConfigError(
                f"{source.model_id}: refused: this shard's router names the model of each call, and would go on naming "
                "the old one; ask the router instead: deepseek-tgi models load MODEL --url http://HOST:PORT"
            )
        await self._turn()
        with self._changing(f"loading {source.model_id}"):
            self._models.claim(generation)
            recipe, demand = self._recipe, demand_of(request.limits)
            if request.compatible:
                recipe, demand = self._as_promised()
            elif request.kv_memory_bytes:
                recipe = recipe.with_memory(request.kv_memory_bytes)
            loading = self._last = Loading(recipe, source, demand, self._device)
            async for step in self._followed(source, generation, loading):
                if not isinstance(step, Loaded):
                    yield pb.LoadProgress(stage=step[0], percent=step[1])
                    continue
                held = self._added(generation, source, demand, step, request.compatible)
                yield pb.LoadProgress(stage="loaded", percent=100.0, loaded=loaded_pb(held, step))
                del step

    @_answered
    async def Publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishResponse:
        """Let calls that name no model mean this one."""
        before = self._models.publish(request.generation)
        held = self._models.of(request.generation)
        facts: dict[str, Any] = {"model": held.source.model_id, "generation": held.generation}
        if not self._state.apply(Event.SWAPPED, **facts):  # what was published before sleeps
            self._state.apply(Event.LOAD)
            self._state.apply(Event.LOADED)
            self._state.apply(Event.WARMED, **facts)
        return pb.PublishResponse(before=before)

    @_answered
    async def Unload(self, request: pb.UnloadRequest, context: Any) -> pb.UnloadResponse:
        """Drop a model, its batches and its memory; while another loads, too."""
        return pb.UnloadResponse(freed_bytes=await self._unload(request.generation))

    @_answered
    async def Discard(self, request: pb.DiscardRequest, context: Any) -> pb.DiscardResponse:
        """Give back the memory of blocks that hold nothing wanted."""
        engine = self._models.of(request.generation).awake
        return pb.DiscardResponse(freed_bytes=await self._thread.run(lambda: engine.discard(list(request.blocks))))

    @_answered
    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Give a model's pages back unless they are kept, and what its weights take; its batches are dropped.

        Weights leave the device for the host's memory, or for good if they are to be dropped.
        """
        if request.drop_weights and request.keep_pages:
            raise RequestError("keep_pages: got drop_weights too; pages are of no use without the weights' engine")
        held = self._models.of(request.generation)
        await self._turn()
        with self._changing(f"putting {held.source.model_id} to sleep"):
            engine = held.awake
            self._state.apply(Event.UNLOAD)
            held.cache_bytes = (await self._thread.run(engine.facts)).cache_bytes
            try:
                freed = await self._thread.run(partial(self._rest, engine, request))
            except BaseException:
                self._state.apply(Event.KEEP)
                raise
            held.asleep = True
            with giving_back():
                if request.drop_weights:
                    held.engine = None
                    held.turns = Turns(self._thread, _nobody, 1)  # the old ones refer to the engine
                del engine
                await self._given_up()
            self._state.apply(Event.SLEPT)
        return pb.SleepResponse(freed_bytes=freed)

    @staticmethod
    def _rest(engine: EngineApi, request: pb.SleepRequest) -> int:
        """Let an engine sleep, or end it; bytes that are free. In the engine's thread."""
        if not request.drop_weights:
            return engine.sleep(request.keep_pages)
        facts = engine.facts()
        freed = facts.weight_bytes + facts.cache_bytes - engine.untouched_bytes()
        engine.close()
        return freed

    @_streamed
    async def Wake(self, request: pb.WakeRequest, context: Any) -> AsyncIterator[pb.LoadProgress]:
        """Have a sleeping model back as it was, but for what its pages held."""
        held = self._models.of(request.generation)
        await self._turn()
        with self._changing(f"waking {held.source.model_id}"):
            if not held.asleep or held.demand is None:
                raise NotReadyError(f"{held.source.model_id} does not sleep")
            if not self._state.apply(Event.WAKE):
                self._state.apply(Event.LOAD, model=held.source.model_id, generation=held.generation)  # it failed once
            try:
                if held.engine is not None:
                    await self._thread.run(held.engine.wake)
                else:
                    async for step in self._reloaded(held, held.demand):
                        yield step
            except BaseException as error:
                self._state.apply(Event.LOAD_FAILED, reason=str(error))
                raise
            held.asleep = False
            self._state.apply(Event.LOADED)
            self._state.apply(Event.WARMED)
            self._prepare()
        yield pb.LoadProgress(stage="awake", percent=100.0)

    async def _reloaded(self, held: Held, demand: Demand) -> AsyncIterator[pb.LoadProgress]:
        """The weights read again, for a cache as large as before: its blocks are promised."""
        assert held.cache_bytes is not None
        loading = self._last = Loading(self._recipe.with_memory(held.cache_bytes), held.source, demand, self._device)
        async for step in loading.run(self._reserved()):
            if isinstance(step, Loaded):
                step.engine.watch(self._thread.progress.step)
                held.engine, held.limits = step.engine, step.limits
                held.turns = Turns(self._thread, step.engine.turn, self._recipe.config.world_size)
                return
            self._progress = step
            yield pb.LoadProgress(stage=step[0], percent=step[1])

    @_answered
    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        """What is held, and what goes on."""
        published = self._models.published
        models = [status_pb(held) for held in self._models.all()]
        if self._change is not None:
            stage, percent = self._progress
            models.append(pb.ModelStatus(model_id=self._change, state="loading", stage=stage, percent=percent))
        return pb.StatusResponse(
            models=models,
            published=0 if published is None else published.generation,
            newest=self._models.newest,
            available_bytes=max(0, memory_of(self._device).available_bytes() - self._reserved()),
        )

    async def _followed(self, source: Source, generation: int, loading: Loading) -> AsyncIterator[Any]:
        """The stages of a load, told to the state too where nothing else serves."""
        alone = self._models.published is None
        if alone:
            self._state.apply(Event.LOAD, model=source.model_id, generation=generation)
        try:
            async for step in loading.run(self._reserved()):
                if not isinstance(step, Loaded):
                    self._progress = step
                    self._state.apply(Event.PROGRESS, stage=step[0], percent=step[1])
                elif alone:
                    self._state.apply(Event.LOADED)
                    self._state.apply(Event.WARMED)
                yield step
        except BaseException as error:
            if alone:
                self._state.apply(Event.LOAD_FAILED, reason=str(error) or type(error).__name__)
            raise

    def _added(self, generation: int, source: Source, demand: Demand, loaded: Loaded, compatible: bool) -> Held:
        held = held_model(generation, source, loaded.engine, self._thread, self._recipe.config.world_size)
        held.demand, held.limits = demand, loaded.limits
        before = self._models.published
        if compatible and before is not None:
            try:
                check_compatible(before, held, loaded)
            except BaseException:
                loaded.engine.close()
                raise
        self._models.add(held)
        self._prepare()
        if before is None or compatible:
            self._models.publish(generation)
            self._state.apply(Event.SWAPPED, model=source.model_id, generation=generation)
        if compatible and before is not None:
            task = asyncio.ensure_future(self._retire(before.generation))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        return held

    def _prepare(self) -> None:
        """Let what may wait be done while nothing else is; several ranks would have to do it together."""
        if self._recipe.config.world_size == 1:
            self._thread.while_idle(self._models.go_on_preparing)

    def _as_promised(self) -> tuple[Recipe, Demand]:
        """What a router that knows one model was promised by `Warmup`: the same limits and as many blocks."""
        published = self._models.published
        if published is None or published.demand is None or published.engine is None:
            raise NotReadyError("no model was warmed up yet, so there is none that another could follow")
        return self._recipe.with_memory(published.engine.facts().cache_bytes), published.demand

    async def _retire(self, generation: int) -> None:
        """Unload a model once none of its requests runs any more."""
        held = self._models.of(generation)
        while await self._thread.run(lambda: held.engine is not None and held.engine.holds(None)):
            await asyncio.sleep(RETIRE_POLL_S)
        await self._unload(generation)

    async def _unload(self, generation: int) -> int:
        held = self._models.remove(generation)
        self._service.forget(generation)
        last = self._models.published is None
        if last:
            self._state.apply(Event.UNLOAD)
        freed = 0
        if held.engine is not None:
            facts = await self._thread.run(held.engine.facts)
            freed = facts.weight_bytes + facts.cache_bytes
            await self._thread.run(held.engine.close)
        name = held.source.model_id
        with giving_back():
            del held
            await self._given_up()
        if last:
            self._state.apply(Event.UNLOADED)
        logger.info("%s (generation %d) is unloaded, %d bytes are free", name, generation, freed)
        return freed

    async def _given_up(self) -> None:
        """Wait until nobody refers to an engine any more: its thread holds on to a call until it takes another."""
        await self._thread.run(_nothing)
        await asyncio.to_thread(trim)

    def _reserved(self) -> int:
        """Memory that the caches of all models were promised and have not taken yet."""
        return sum(held.engine.untouched_bytes() for held in self._models.all() if held.engine is not None)

    async def _turn(self) -> None:
        """Wait for the end of a load that was given up, and of what is about to end."""
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._free.wait(), TURN_S)
        if self._change is None and self._last is not None:
            await asyncio.to_thread(self._last.over.wait, LEFT_S)
            self._last = None

    def _changing(self, what: str) -> _Change:
        if self._change is not None:
            raise NotReadyError(f"{what}: refused while {self._change}; one change at a time")
        if self._state.state in {State.DRAINING, State.FAILED, State.STOPPED}:
            raise NotReadyError(f"{what}: refused, the shard is {self._state.state.value}")
        return _Change(self, what)


class _Change:
    """The time during which a shard's models are being changed."""

    def __init__(self, service: ControlService, what: str) -> None:
        self._service = service
        self._what = what

    def __enter__(self) -> None:
        self._service._change = self._what
        self._service._free.clear()

    def __exit__(self, *_: object) -> None:
        self._service._change = None
        self._service._free.set()
        self._service._progress = ("", 0.0)


def _nobody(call: int) -> int:
    return call


def _nothing() -> None:
    return
