"""Asking the shards to load and unload models: every rank at once, and their answers made one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from deepseek_tgi.errors import CheckpointError, ConfigError, DeepseekTgiError, NotReadyError, ResourceError
from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.pb.control_pb2_grpc import ModelControlStub
from deepseek_tgi.router.errors import ModelChangeError

Told = Callable[[str, float], None]
KINDS: dict[str, type[DeepseekTgiError]] = {
    "RESOURCE_EXHAUSTED": ResourceError,
    "FAILED_PRECONDITION": ConfigError,
    "UNAVAILABLE": NotReadyError,
    "UNIMPLEMENTED": CheckpointError,
}
QUICK_TIMEOUT_S = 60.0
UNLOAD_TIMEOUT_S = 600.0


class ControlClient:
    """`ModelControl` of all ranks, in rank order."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._stubs: list[Any] = [ModelControlStub(channel) for channel in channels]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._stubs)

    async def published(self) -> int | None:
        """The generation that calls without one mean; None if these shards cannot change models."""
        try:
            answer: pb.StatusResponse = await self._stubs[0].Status(pb.StatusRequest(), timeout=QUICK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise raised(error) from error
        return int(answer.published) or None

    async def status(self) -> list[pb.StatusResponse]:
        """What each rank holds."""
        return await self._all("Status", pb.StatusRequest(), QUICK_TIMEOUT_S)

    async def load(self, request: pb.LoadRequest, told: Told) -> pb.LoadedModel:
        """Load on every rank; the smallest limits of all.

        Raises what the first failing rank says, and no rank keeps it.
        `told` hears the stage and percentage of the rank that is furthest behind.
        """
        progress = [("", 0.0)] * len(self._stubs)
        done: list[pb.LoadedModel | None] = [None] * len(self._stubs)

        async def follow(rank: int) -> None:
            try:
                async for step in self._stubs[rank].Load(request):
                    progress[rank] = (step.stage, step.percent)
                    told(*min(progress, key=lambda each: each[1] if each[0] == step.stage else -1.0))
                    if step.HasField("loaded"):
                        done[rank] = step.loaded
            except grpc.aio.AioRpcError as error:
                raise raised(error) from error

        tasks = [asyncio.ensure_future(follow(rank)) for rank in range(len(self._stubs))]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            unload = pb.UnloadRequest(generation=request.generation)
            keeping = [stub for stub, loaded in zip(self._stubs, done, strict=True) if loaded is not None]
            calls = [stub.Unload(unload, timeout=UNLOAD_TIMEOUT_S) for stub in keeping]
            await asyncio.gather(*calls, return_exceptions=True)  # at once: ranks leave together
            raise
        everywhere = [each for each in done if each is not None]
        return min(everywhere, key=lambda each: (each.max_supported_total_tokens, each.max_total_tokens))

    async def publish(self, generation: int) -> None:
        """Let calls without a generation mean this one."""
        await self._all("Publish", pb.PublishRequest(generation=generation), QUICK_TIMEOUT_S)

    async def unload(self, generation: int) -> int:
        """Drop a model on every rank; bytes that are free again."""
        answers = await self._all("Unload", pb.UnloadRequest(generation=generation), UNLOAD_TIMEOUT_S)
        return sum(answer.freed_bytes for answer in answers)

    async def discard(self, generation: int, blocks: Sequence[int]) -> int:
        """Give back the memory of blocks that nothing will be read from; bytes."""
        request = pb.DiscardRequest(generation=generation, blocks=blocks)
        return sum(answer.freed_bytes for answer in await self._all("Discard", request, QUICK_TIMEOUT_S))

    async def sleep(self, generation: int, drop_weights: bool, keep_pages: bool) -> int:
        """Give back a model's weights and, unless they are kept, its pages; bytes. If a rank cannot, none sleeps."""
        request = pb.SleepRequest(generation=generation, drop_weights=drop_weights, keep_pages=keep_pages)
        calls = [stub.Sleep(request, timeout=UNLOAD_TIMEOUT_S) for stub in self._stubs]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if not failed:
            return sum(answer.freed_bytes for answer in answers if not isinstance(answer, BaseException))
        asleep = [stub for stub, answer in zip(self._stubs, answers, strict=True) if answer not in failed]
        await self._woken(asleep, generation, lambda _stage, _percent: None)
        if isinstance(failed[0], grpc.aio.AioRpcError):
            raise raised(failed[0]) from failed[0]
        raise failed[0]

    async def wake(self, generation: int, told: Told) -> None:
        """Have a sleeping model back."""
        await self._woken(self._stubs, generation, told)

    async def _woken(self, stubs: Sequence[Any], generation: int, told: Told) -> None:
        async def follow(stub: Any) -> None:
            async for step in stub.Wake(pb.WakeRequest(generation=generation)):
                told(step.stage, step.percent)

        try:
            await asyncio.gather(*(follow(stub) for stub in stubs))
        except grpc.aio.AioRpcError as error:
            raise raised(error) from error

    async def _all(self, name: str, request: Any, timeout: float) -> list[Any]:
        calls = [getattr(stub, name)(request, timeout=timeout) for stub in self._stubs]
        try:
            return list(await asyncio.gather(*calls))
        except grpc.aio.AioRpcError as error:
            raise raised(error) from error


def raised(error: grpc.aio.AioRpcError) -> DeepseekTgiError:
    """The error that a shard's status stands for."""
    text, code = error.details() or error.code().name, error.code().name
    return ModelChangeError(text, KINDS.get(code, DeepseekTgiError))
