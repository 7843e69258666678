"""The eight RPCs, each a few lines: check the state, hand the work to the engine's thread, convert the answer."""

# ruff: noqa: N802 - the methods carry the wire's names

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from deepseek_tgi.core import HEALTH_REQUEST_ID, Request, SamplingParams, StepResult, StopRule
from deepseek_tgi.engine.config import ShardInfo
from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb import generate_pb2_grpc
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State
from deepseek_tgi.server import convert
from deepseek_tgi.server.engine_api import EngineApi
from deepseek_tgi.server.engine_thread import EngineThread
from deepseek_tgi.server.mixture import Mixture
from deepseek_tgi.server.models import FIRST_GENERATION, Demand, Held, Models, Source, named_generation
from deepseek_tgi.server.turns import Turns, call_number
from deepseek_tgi.server.waiting_batches import WaitingBatches
from deepseek_tgi.telemetry.metrics import ShardMetrics

R = TypeVar("R")

LIVENESS_REQUEST = Request(
    id=HEALTH_REQUEST_ID,
    text="liveness",
    truncate=1,
    sampling=SamplingParams(),
    stop=StopRule(max_new_tokens=1),
    blocks=(0,),
    slots=(0,),
)
SERVICE = "generate.v3.TextGenerationService"


class Evidence(Protocol):
    """Who is told how steps end."""

    def worked(self) -> None: ...
    def failed(self, error: Exception) -> None: ...


class NoEvidence:
    """Nobody."""

    def worked(self) -> None:
        """Not noted."""

    def failed(self, error: Exception) -> None:
        """Not noted."""


class ShardService(generate_pb2_grpc.TextGenerationServiceServicer):
    """Serves the engines of `models`, each to the calls that name it.

    Health, Info and ServiceDiscovery are answered on the event loop, the rest in the engine's thread. Warmup, Prefill
    and Decode are what all ranks do together: those run in one order on all.
    """

    def __init__(
        self, models: Models, thread: EngineThread, state: Owner, urls: Sequence[str], metrics: ShardMetrics
    ) -> None:
        self._models = models
        self._mixture = Mixture(models)
        self.thread = thread
        self._state = state
        self._urls = list(urls)
        self._metrics = metrics
        self._waiting = WaitingBatches()
        self.evidence: Evidence = NoEvidence()

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        """Constant facts of the model."""
        return self._models.of(named_generation(context)).info

    async def ServiceDiscovery(self, request: pb.ServiceDiscoveryRequest, context: Any) -> pb.ServiceDiscoveryResponse:
        """Urls of all ranks, in rank order."""
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        """The device is asked when nothing runs; a running step is itself a sign of life and is not waited for."""
        snapshot = self._state.current
        if not snapshot.report.live:
            raise NotReadyError(f"the shard is {snapshot.state.value}")
        if self.thread.idle:
            await self.thread.run(self._models.check_health, "the device check")
        return pb.HealthResponse()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Any) -> pb.ClearCacheResponse:
        """Forget one batch or all; an unknown id is fine."""
        batch_id = request.id if request.HasField("id") else None
        generation = named_generation(context)
        steps = self._steps(generation)
        if batch_id is None:
            self._waiting.drop_all(generation)
        else:
            self._waiting.drop(generation, [batch_id])
        await self.thread.run(lambda: steps.clear(batch_id))
        return pb.ClearCacheResponse()

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Any) -> pb.FilterBatchResponse:
        """Keep the named requests, in that order."""
        steps = self._steps(named_generation(context))
        batch = await self.thread.run(lambda: steps.filter(request.batch_id, list(request.request_ids)))
        return pb.FilterBatchResponse(batch=convert.cached_batch_pb(batch))

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        """Measure; the shard is ready afterwards. A second router may warm up again."""
        self._state.require(State.WARMING, State.READY, State.DEGRADED)
        self._state.apply(Event.WARM)
        held = self._models.of(named_generation(context))
        response = await held.turns.run(call_number("Warmup"), lambda: _warmup(held, request), "Warmup")
        self._state.apply(Event.WARMED)
        if len(self._urls) == 1:  # several ranks would have to do it together
            self.thread.while_idle(self._models.go_on_preparing)
        return response

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        """One step for new requests, and for a cached batch if it is named."""
        self._state.require_admission()
        number = call_number("Prefill", request.batch.id, *(each.id for each in request.batch.requests))
        generation = named_generation(context)
        turns = self._models.of(generation).turns
        return await self._watched(turns.run(number, lambda: self._prefill(generation, request), "Prefill"))

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        """One step for cached batches."""
        self._state.require_running()
        number = call_number("Decode", *(batch.id for batch in request.batches))
        generation = named_generation(context)
        turns = self._models.of(generation).turns
        return await self._watched(turns.run(number, lambda: self._decode(generation, request), "Decode"))

    @property
    def holds_requests(self) -> bool:
        """True while a batch waits for its next step."""
        return bool(self._waiting)

    async def drop(self, batch_ids: Sequence[int], generation: int | None) -> None:
        """Forget the batches of a failed call."""
        self._waiting.drop(generation, batch_ids)
        try:
            steps = self._steps(generation)
        except NotReadyError:
            return
        for batch_id in batch_ids:
            await self.thread.run(lambda batch_id=batch_id: steps.clear(batch_id))  # type: ignore[misc]

    def forget(self, generation: int) -> None:
        """A model and its batches are gone."""
        self._waiting.drop_all(generation)

    def _steps(self, generation: int | None) -> EngineApi | Mixture:
        """What runs the steps of a call: the model it names, or the published one and those it followed."""
        return self._mixture if generation is None else self._models.of(generation).awake

    def check_device(self) -> Future[None] | None:
        """Ask the engine's device, if the engine has time for it; from any thread."""
        return self.thread.submit(self._models.check_health, "the device check") if self.thread.idle else None

    def prove(self) -> Future[None] | None:
        """Generate one token, as a router's liveness request does; from any thread.

        None where that takes several ranks, which only a router reaches, or where there is no model.
        """
        if len(self._urls) > 1 or self._models.published is None:
            return None
        return self.thread.submit(self._generate_one, "the liveness prefill")

    def _generate_one(self) -> None:
        self._mixture.prefill(HEALTH_REQUEST_ID, [LIVENESS_REQUEST], None)

    async def _watched(self, step: Awaitable[R]) -> R:
        """A step whose end is evidence."""
        try:
            result = await step
        except Exception as error:
            self.evidence.failed(error)
            raise
        self.evidence.worked()
        return result

    def _prefill(self, generation: int | None, request: pb.PrefillRequest) -> pb.PrefillResponse:
        cached = convert.cached_batch_of(request.cached_batch) if request.HasField("cached_batch") else None
        result = self._steps(generation).prefill(request.batch.id, convert.requests_of(request.batch), cached)
        self._waiting.drop(generation, [] if cached is None else [cached.id])
        self._count("prefill", generation, result)
        return convert.prefill_pb(result)

    def _decode(self, generation: int | None, request: pb.DecodeRequest) -> pb.DecodeResponse:
        ids = [batch.id for batch in request.batches]
        result = self._steps(generation).decode(ids)
        self._waiting.drop(generation, ids)
        self._count("decode", generation, result)
        return convert.decode_pb(result)

    def _count(self, method: str, generation: int | None, result: StepResult) -> None:
        self._metrics.forward_duration.labels(method).observe(result.timings.forward_ns / 1e9)
        self._metrics.generated_tokens.inc(sum(len(generation.tokens.ids) for generation in result.generations))
        if result.batch is not None:
            self._waiting.add(generation, result.batch.id)
        self._metrics.cached_requests.set(result.batch.size if result.batch is not None else 0)


def _info_pb(info: ShardInfo) -> pb.InfoResponse:
    return pb.InfoResponse(
        requires_padding=info.requires_padding,
        dtype=info.dtype,
        device_type=info.device_type,
        speculate=info.speculate,
        support_chunking=info.support_chunking,
        use_prefix_caching=info.use_prefix_caching,
        attention_impl=info.attention_impl,
        block_size=info.block_size,
    )


def first_model(engine: EngineApi, thread: EngineThread, source: Source, num_ranks: int) -> Models:
    """The models of a process that has just loaded its first."""
    models = Models()
    models.add(held_model(FIRST_GENERATION, source, engine, thread, num_ranks))
    models.publish(FIRST_GENERATION)
    return models


def held_model(generation: int, source: Source, engine: EngineApi, thread: EngineThread, num_ranks: int) -> Held:
    """A model that calls can reach."""
    engine.watch(thread.progress.step)
    return Held(generation, source, engine, Turns(thread, engine.turn, num_ranks), _info_pb(engine.info()))


def _warmup(held: Held, request: pb.WarmupRequest) -> pb.WarmupResponse:
    held.demand = Demand(
        request.max_input_tokens if request.HasField("max_input_tokens") else None,
        request.max_prefill_tokens,
        request.max_total_tokens if request.HasField("max_total_tokens") else None,
    )
    held.limits = result = held.awake.warmup(
        convert.requests_of(request.batch, same_ids=True),
        held.demand.max_input_tokens,
        held.demand.max_prefill_tokens,
        held.demand.max_total_tokens,
    )
    return pb.WarmupResponse(
        max_supported_total_tokens=result.max_supported_total_tokens,
        max_input_tokens=result.max_input_tokens,
        max_total_tokens=result.max_total_tokens,
    )
