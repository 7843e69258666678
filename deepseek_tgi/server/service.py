"""The eight RPCs, each a few lines: check the state, hand the work to the engine's thread, convert the answer."""

# ruff: noqa: N802 - the methods carry the wire's names

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from deepseek_tgi.core import HEALTH_REQUEST_ID, CachedBatch, Request, SamplingParams, StepResult, StopRule
from deepseek_tgi.engine.config import ShardInfo, WarmupResult
from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb import generate_pb2_grpc
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State
from deepseek_tgi.server import convert
from deepseek_tgi.server.engine_thread import EngineThread
from deepseek_tgi.server.turns import Turns, call_number
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


class EngineApi(Protocol):
    """The engine as the service sees it: synchronous, called from one thread."""

    def watch(self, on_progress: Callable[[], None]) -> None: ...
    def info(self) -> ShardInfo: ...
    def turn(self, call: int) -> int: ...
    def go_on_preparing(self) -> bool: ...
    def warmup(
        self,
        requests: list[Request],
        max_input_tokens: int | None,
        max_prefill_tokens: int,
        max_total_tokens: int | None,
    ) -> WarmupResult: ...
    def prefill(self, batch_id: int, requests: list[Request], cached: CachedBatch | None) -> StepResult: ...
    def decode(self, batch_ids: list[int]) -> StepResult: ...
    def filter(self, batch_id: int, request_ids: list[int]) -> CachedBatch: ...
    def clear(self, batch_id: int | None) -> None: ...
    def health(self) -> None: ...
    def close(self) -> None: ...


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
    """Serves one engine. Health, Info and ServiceDiscovery are answered on the event loop, the rest in the thread.

    Warmup, Prefill and Decode are what all ranks do together: those run in one order on all.
    """

    def __init__(
        self, engine: EngineApi, thread: EngineThread, state: Owner, urls: Sequence[str], metrics: ShardMetrics
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._state = state
        self._urls = list(urls)
        self._turns = Turns(thread, engine.turn, len(urls))
        self._metrics = metrics
        self._held: set[int] = set()
        self.evidence: Evidence = NoEvidence()
        engine.watch(thread.progress.step)
        self._info = _info_pb(engine.info())

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        """Constant facts."""
        return self._info

    async def ServiceDiscovery(self, request: pb.ServiceDiscoveryRequest, context: Any) -> pb.ServiceDiscoveryResponse:
        """Urls of all ranks, in rank order."""
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        """The device is asked when nothing runs; a running step is itself a sign of life and is not waited for."""
        snapshot = self._state.current
        if not snapshot.report.live:
            raise NotReadyError(f"the shard is {snapshot.state.value}")
        if self._thread.idle:
            await self._thread.run(self._engine.health, "the device check")
        return pb.HealthResponse()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Any) -> pb.ClearCacheResponse:
        """Forget one batch or all; an unknown id is fine."""
        batch_id = request.id if request.HasField("id") else None
        if batch_id is None:
            self._held.clear()
        else:
            self._held.discard(batch_id)
        await self._thread.run(lambda: self._engine.clear(batch_id))
        return pb.ClearCacheResponse()

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Any) -> pb.FilterBatchResponse:
        """Keep the named requests, in that order."""
        batch = await self._thread.run(lambda: self._engine.filter(request.batch_id, list(request.request_ids)))
        return pb.FilterBatchResponse(batch=convert.cached_batch_pb(batch))

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        """Measure; the shard is ready afterwards. A second router may warm up again."""
        self._state.require(State.WARMING, State.READY, State.DEGRADED)
        self._state.apply(Event.WARM)
        response = await self._turns.run(call_number("Warmup"), lambda: self._warmup(request), "Warmup")
        self._state.apply(Event.WARMED)
        if len(self._urls) == 1:  # several ranks would have to do it together
            self._thread.while_idle(self._engine.go_on_preparing)
        return response

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        """One step for new requests, and for a cached batch if it is named."""
        self._state.require_admission()
        number = call_number("Prefill", request.batch.id, *(each.id for each in request.batch.requests))
        return await self._watched(self._turns.run(number, lambda: self._prefill(request), "Prefill"))

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        """One step for cached batches."""
        self._state.require_running()
        number = call_number("Decode", *(batch.id for batch in request.batches))
        return await self._watched(self._turns.run(number, lambda: self._decode(request), "Decode"))

    @property
    def holds_requests(self) -> bool:
        """True while a batch waits for its next step."""
        return bool(self._held)

    async def drop(self, batch_ids: Sequence[int]) -> None:
        """Forget the batches of a failed call."""
        self._held.difference_update(batch_ids)
        for batch_id in batch_ids:
            await self._thread.run(lambda batch_id=batch_id: self._engine.clear(batch_id))  # type: ignore[misc]

    def check_device(self) -> Future[None] | None:
        """Ask the engine's device, if the engine has time for it; from any thread."""
        return self._thread.submit(self._engine.health, "the device check") if self._thread.idle else None

    def prove(self) -> Future[None] | None:
        """Generate one token, as a router's liveness request does; from any thread.

        None where that takes several ranks: only a router reaches them all.
        """
        return None if len(self._urls) > 1 else self._thread.submit(self._generate_one, "the liveness prefill")

    def _generate_one(self) -> None:
        self._engine.prefill(HEALTH_REQUEST_ID, [LIVENESS_REQUEST], None)

    async def _watched(self, step: Awaitable[R]) -> R:
        """A step whose end is evidence."""
        try:
            result = await step
        except Exception as error:
            self.evidence.failed(error)
            raise
        self.evidence.worked()
        return result

    def _warmup(self, request: pb.WarmupRequest) -> pb.WarmupResponse:
        result = self._engine.warmup(
            convert.requests_of(request.batch, same_ids=True),
            request.max_input_tokens if request.HasField("max_input_tokens") else None,
            request.max_prefill_tokens,
            request.max_total_tokens if request.HasField("max_total_tokens") else None,
        )
        return pb.WarmupResponse(
            max_supported_total_tokens=result.max_supported_total_tokens,
            max_input_tokens=result.max_input_tokens,
            max_total_tokens=result.max_total_tokens,
        )

    def _prefill(self, request: pb.PrefillRequest) -> pb.PrefillResponse:
        cached = convert.cached_batch_of(request.cached_batch) if request.HasField("cached_batch") else None
        result = self._engine.prefill(request.batch.id, convert.requests_of(request.batch), cached)
        self._held.difference_update([] if cached is None else [cached.id])
        self._count("prefill", result)
        return convert.prefill_pb(result)

    def _decode(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        ids = [batch.id for batch in request.batches]
        result = self._engine.decode(ids)
        self._held.difference_update(ids)
        self._count("decode", result)
        return convert.decode_pb(result)

    def _count(self, method: str, result: StepResult) -> None:
        self._metrics.forward_duration.labels(method).observe(result.timings.forward_ns / 1e9)
        self._metrics.generated_tokens.inc(sum(len(generation.tokens.ids) for generation in result.generations))
        if result.batch is not None:
            self._held.add(result.batch.id)
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
