"""The gRPC side of the door: every call goes to all ranks at once with equal content, and their answers become one.

Knows messages and merge rules; nothing of queues, blocks or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb.generate_pb2_grpc import TextGenerationServiceStub
from deepseek_tgi.router.errors import ShardError
from deepseek_tgi.router.spans import Spans

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

Step: TypeAlias = pb.PrefillResponse | pb.DecodeResponse
R = TypeVar("R")

HEALTH_TIMEOUT_S = 10.0
"""A shard that does not answer Health for this long (frozen, not busy) is not live. TGI's router waits for ever."""
CONNECT_TIMEOUT_S = 10.0
GENERATION_KEY = "x-deepseek-generation"
"""Metadata that names the model a call is for; a shard that has only one need not know it."""
CHANNEL_OPTIONS = (
    ("grpc.default_authority", "[::]:50051"),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


class ShardClient:
    """Connections to all ranks, in rank order."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], spans: Spans | None = None) -> None:
        self.channels = list(channels)
        self.spans = spans or Spans()
        self._stubs: list[Any] = [TextGenerationServiceStub(channel) for channel in channels]
        self._generation: tuple[tuple[str, str], ...] | None = None

    @classmethod
    async def connect(cls, master_uds_path: str, spans: Spans | None = None) -> ShardClient:
        """Connect to rank 0, ask it for all ranks and connect to those, once.

        Raises: `NotReadyError` naming the socket that does not answer.
        """
        master = await _open(master_uds_path)
        try:
            found = await TextGenerationServiceStub(master).ServiceDiscovery(pb.ServiceDiscoveryRequest())
        except grpc.aio.AioRpcError as error:
            raise NotReadyError(
                f"{master_uds_path}: Server does not support v3 interface: {error.details()}; "
                "expected a shard that speaks generate.v3"
            ) from error
        finally:
            await master.close()
        return cls([await _open(url.removeprefix("unix://")) for url in found.urls], spans)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._stubs)

    def of_generation(self, generation: int | None) -> ShardClient:
        """The same connections, for the calls of one model; None: of the only one there is."""
        client = ShardClient(self.channels, self.spans)
        client._generation = None if generation is None else ((GENERATION_KEY, str(generation)),)
        return client

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(channel.close() for channel in self.channels))

    async def info(self) -> pb.InfoResponse:
        """Facts about the shard; the last rank's answer."""
        answer: pb.InfoResponse = await self._all("Info", pb.InfoRequest(), _last)
        return answer

    async def health(self) -> None:
        """Raise `ShardError` unless every rank says it is alive. TGI's router asks all and hears the last."""
        await self._all("Health", pb.HealthRequest(), _every, timeout=HEALTH_TIMEOUT_S)

    async def clear_cache(self, batch_id: int | None = None) -> None:
        """Forget one cached batch, or all. Raises `ShardError` if any rank errs."""
        await self._all("ClearCache", pb.ClearCacheRequest(id=batch_id), _every)

    async def warmup(self, request: pb.WarmupRequest) -> pb.WarmupResponse:
        """Smallest limits of all ranks. Raises `ShardError` if any rank errs."""
        answers: list[pb.WarmupResponse] = await self._all("Warmup", request, _every)
        return min(answers, key=lambda a: (a.max_supported_total_tokens, a.max_input_tokens, a.max_total_tokens))

    def filter_batch(self, batch_id: int, request_ids: Iterable[int]) -> Awaitable[pb.FilterBatchResponse]:
        """Keep these requests; the last rank's answer, or any rank's error: a batch that differs is of no more use."""
        return self._all("FilterBatch", pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids), _agreed)

    def prefill(
        self,
        batch: pb.Batch,
        cached: pb.CachedBatch | None = None,
        timeout: float | None = None,
        linked: Iterable[SpanContext | None] = (),
    ) -> Awaitable[Step]:
        """One step for new requests (and the cached batch's). The call is under way when this returns.

        `linked` are the spans of the HTTP requests that ask for it.
        """
        return self._all("Prefill", pb.PrefillRequest(batch=batch, cached_batch=cached), _merged, timeout, linked)

    def decode(self, batches: Sequence[pb.CachedBatch]) -> Awaitable[Step]:
        """One step for cached batches. The call is under way when this returns."""
        return self._all("Decode", pb.DecodeRequest(batches=batches), _merged)

    def _all(
        self,
        name: str,
        request: Any,
        merge: Callable[[list[Any]], R],
        timeout: float | None = None,
        linked: Iterable[SpanContext | None] = (),
    ) -> Awaitable[R]:
        span, metadata = self.spans.call(name, linked)
        if self._generation is not None:
            metadata = self._generation if metadata is None else (*metadata, *self._generation)
        calls = [getattr(stub, name)(request, timeout=timeout, metadata=metadata) for stub in self._stubs]
        return _answers(calls, merge, span)


async def _answers(calls: list[Any], merge: Callable[[list[Any]], R], span: Span | None) -> R:
    answers: list[Any] = []
    try:
        for call in calls:
            try:
                answers.append(await call)
            except grpc.aio.AioRpcError as error:
                answers.append(ShardError(error.details() or error.code().name, error.code().name))
    finally:
        if span is not None:
            span.end()
    return merge(answers)


def _last(answers: list[Any]) -> Any:
    if isinstance(answers[-1], ShardError):
        raise answers[-1]
    return answers[-1]


def _every(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, ShardError):
            raise answer
    return answers


def _agreed(answers: list[Any]) -> Any:
    return _every(answers)[-1]


def _merged(answers: list[Any]) -> Any:
    """Generations of all ranks, the batch of the last, the timings of the slowest."""
    _every(answers)
    if len(answers) == 1:
        return answers[0]
    merged = type(answers[0])()
    merged.CopyFrom(max(answers, key=lambda answer: answer.total_ns))
    del merged.generations[:]
    for answer in answers:
        merged.generations.extend(answer.generations)
    merged.ClearField("batch")
    if answers[-1].HasField("batch"):
        merged.batch.CopyFrom(answers[-1].batch)
    return merged


async def _open(uds_path: str) -> grpc.aio.Channel:
    """Connect once: a socket that refuses is told at once, one that says nothing after a while."""
    channel = grpc.aio.insecure_channel(f"unix:{uds_path}", options=CHANNEL_OPTIONS)
    try:
        reason = await asyncio.wait_for(_refusal(channel), CONNECT_TIMEOUT_S)
    except (asyncio.TimeoutError, TimeoutError):
        reason = f"no answer within {CONNECT_TIMEOUT_S:g} s"
    if reason:
        await channel.close()
        raise NotReadyError(
            f"{uds_path}: cannot connect to a shard: {reason}; expected one that is listening: start it first, or name "
            "its socket with --master-shard-uds-path"
        )
    return channel


async def _refusal(channel: grpc.aio.Channel) -> str:
    """Wait until the channel is ready (an empty text) or was refused."""
    while (state := channel.get_state(try_to_connect=True)) != grpc.ChannelConnectivity.READY:
        if state in {grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN}:
            return "the connection was refused"
        await channel.wait_for_state_change(state)
    return ""
