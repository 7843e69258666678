"""The control side of a shard without a model: loads go as the test says, and every call is kept."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.pb import control_pb2_grpc

SHORT = (grpc.StatusCode.RESOURCE_EXHAUSTED, "memory: 10 bytes are needed, 5 are available")
BAD = (grpc.StatusCode.FAILED_PRECONDITION, "model.safetensors: cut short")


@dataclass
class FakeControl(control_pb2_grpc.ModelControlServicer):
    """`outcomes` of the coming loads: None for a good one, else the status it ends with. `gate` holds loads back.

    Calls named in `failing` end with INTERNAL; a load in it ends without having loaded anything.
    """

    folder: Path
    block_size: int
    outcomes: list[tuple[grpc.StatusCode, str] | None] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: int = 1024
    tokenizer_sha256: str | None = None
    newest: int = 1
    failing: set[str] = field(default_factory=set)
    unload_gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.unload_gate.set()

    @property
    def names(self) -> list[str]:
        """What was called, in order, questions left out."""
        return [name for name, _ in self.calls]

    async def _perhaps_failing(self, name: str, context: Any) -> None:
        if name in self.failing:
            await context.abort(grpc.StatusCode.INTERNAL, f"{name} broke")

    async def Status(self, request: Any, context: Any) -> pb.StatusResponse:
        return pb.StatusResponse(published=1, newest=self.newest)

    async def Load(self, request: Any, context: Any) -> AsyncIterator[pb.LoadProgress]:
        self.calls.append(("load", request.source.model_id))
        self.newest = max(self.newest, request.generation)
        yield pb.LoadProgress(stage="loading", percent=50.0)
        await self.gate.wait()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            await context.abort(*outcome)
        if "load" in self.failing:
            return
        digest = hashlib.sha256((self.folder / "tokenizer.json").read_bytes()).hexdigest()
        yield pb.LoadProgress(
            stage="loaded",
            percent=100.0,
            loaded=pb.LoadedModel(
                generation=request.generation,
                folder=str(self.folder),
                block_size=self.block_size,
                support_chunking=True,
                use_prefix_caching=True,
                max_supported_total_tokens=self.tokens * 4,
                max_input_tokens=self.tokens - 1,
                max_total_tokens=self.tokens,
                tokenizer_sha256=self.tokenizer_sha256 or digest,
            ),
        )

    async def Publish(self, request: Any, context: Any) -> pb.PublishResponse:
        self.calls.append(("publish", request.generation))
        await self._perhaps_failing("publish", context)
        return pb.PublishResponse()

    async def Unload(self, request: Any, context: Any) -> pb.UnloadResponse:
        self.calls.append(("unload", request.generation))
        await self.unload_gate.wait()
        await self._perhaps_failing("unload", context)
        return pb.UnloadResponse(freed_bytes=1)

    async def Discard(self, request: Any, context: Any) -> pb.DiscardResponse:
        self.calls.append(("discard", list(request.blocks)))
        await self._perhaps_failing("discard", context)
        return pb.DiscardResponse(freed_bytes=len(request.blocks))

    async def Sleep(self, request: Any, context: Any) -> pb.SleepResponse:
        self.calls.append(("sleep", request.drop_weights))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            await context.abort(*outcome)
        return pb.SleepResponse()

    async def Wake(self, request: Any, context: Any) -> AsyncIterator[pb.LoadProgress]:
        self.calls.append(("wake", request.generation))
        await self.gate.wait()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            await context.abort(*outcome)
        yield pb.LoadProgress(stage="awake", percent=100.0)
