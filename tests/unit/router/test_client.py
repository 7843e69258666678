"""The router's client of two ranks: what goes to both, and what their answers become."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb.generate_pb2_grpc import (
    TextGenerationServiceServicer,
    add_TextGenerationServiceServicer_to_server,
)
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.errors import ShardError

CALLS = ("ServiceDiscovery", "Info", "Health", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode")


class Rank(TextGenerationServiceServicer):
    """Answers from a table of message or status code by call, and notes what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[Any] = []
        for name in CALLS:
            setattr(self, name, self._handler(name))

    def _handler(self, name: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self.asked.append(request)
            answer = self.answers[name]
            if isinstance(answer, grpc.StatusCode):
                await context.abort(answer, f"{name} failed")
            return answer

        return handle


@asynccontextmanager
async def connected(folder: Path, *answers: dict[str, Any]) -> AsyncIterator[tuple[ShardClient, list[Rank]]]:
    urls = [f"unix://{folder}/s-{rank}" for rank in range(len(answers))]
    found = pb.ServiceDiscoveryResponse(urls=urls)
    ranks = [Rank({"ServiceDiscovery": found, **each}) for each in answers]
    servers = []
    for rank, url in zip(ranks, urls, strict=True):
        server = grpc.aio.server()
        add_TextGenerationServiceServicer_to_server(rank, server)
        server.add_insecure_port(f"unix:{url.removeprefix('unix://')}")
        await server.start()
        servers.append(server)
    client = await ShardClient.connect(urls[0].removeprefix("unix://"))
    try:
        yield client, ranks
    finally:
        await client.close()
        for server in servers:
            await server.stop(None)


def stepped(*ids: int, total_ns: int, batch: int | None) -> pb.DecodeResponse:
    cached = None if batch is None else pb.CachedBatch(id=batch, request_ids=[0, 1, 2], size=3)
    reports = [pb.Generation(request_id=number) for number in ids]
    return pb.DecodeResponse(generations=reports, batch=cached, total_ns=total_ns, forward_ns=total_ns - 1)


async def test_generations_are_joined_and_the_slowest_rank_is_timed(tmp_path: Path) -> None:
    answers = [{"Decode": stepped(0, 2, total_ns=9, batch=4)}, {"Decode": stepped(1, total_ns=5, batch=4)}]
    async with connected(tmp_path, *answers) as (client, ranks):
        assert client.world_size == 2
        merged = await client.decode([pb.CachedBatch(id=4)])
    assert [g.request_id for g in merged.generations] == [0, 2, 1]
    assert (merged.batch.id, merged.total_ns, merged.forward_ns) == (4, 9, 8)
    assert ranks[0].asked[1:] == ranks[1].asked == [pb.DecodeRequest(batches=[pb.CachedBatch(id=4)])]


async def test_no_batch_is_left_when_the_last_rank_returns_none(tmp_path: Path) -> None:
    answers = [{"Prefill": stepped(total_ns=9, batch=4)}, {"Prefill": stepped(total_ns=5, batch=None)}]
    async with connected(tmp_path, *answers) as (client, _):
        assert not (await client.prefill(pb.Batch(id=4))).HasField("batch")


async def test_warm_up_keeps_the_smallest_limits(tmp_path: Path) -> None:
    limits = [
        pb.WarmupResponse(max_supported_total_tokens=800, max_input_tokens=9, max_total_tokens=10),
        pb.WarmupResponse(max_supported_total_tokens=640, max_input_tokens=99, max_total_tokens=100),
    ]
    async with connected(tmp_path, *({"Warmup": each} for each in limits)) as (client, _):
        assert await client.warmup(pb.WarmupRequest(max_prefill_tokens=64)) == limits[1]


@pytest.mark.parametrize("sick", [0, 1])
@pytest.mark.parametrize(
    ("name", "good", "call"),
    [
        ("Health", pb.HealthResponse(), lambda c: c.health()),
        ("FilterBatch", pb.FilterBatchResponse(), lambda c: c.filter_batch(4, [1])),
        ("ClearCache", pb.ClearCacheResponse(), lambda c: c.clear_cache(4)),
        ("Warmup", pb.WarmupResponse(), lambda c: c.warmup(pb.WarmupRequest())),
        ("Decode", pb.DecodeResponse(), lambda c: c.decode([])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_error_of_any_rank_is_the_answer(
    tmp_path: Path, name: str, good: Any, call: Callable[[ShardClient], Awaitable[Any]], sick: int
) -> None:
    answers = [{name: grpc.StatusCode.INTERNAL if rank == sick else good} for rank in range(2)]
    async with connected(tmp_path, *answers) as (client, ranks):
        with pytest.raises(ShardError, match=f"{name} failed"):
            await call(client)
    assert len(ranks[1].asked) == 1, "the other rank was asked all the same"


async def test_a_rank_that_does_not_listen_is_named(tmp_path: Path) -> None:
    found = pb.ServiceDiscoveryResponse(urls=[f"unix://{tmp_path}/s-0", f"unix://{tmp_path}/s-1"])
    with pytest.raises(NotReadyError, match="s-1"):
        async with connected(tmp_path, {"ServiceDiscovery": found}):
            pytest.fail("connected to nobody")
