"""The embedded router in the test's own event loop, in front of `FakeShard`s, reachable over loopback HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from fake_control import FakeControl
from fake_script import Traits
from fake_shard import FakeShard
from tiny_tokenizer import write_tokenizer

from deepseek_tgi.pb import control_pb2_grpc
from deepseek_tgi.router.assembly import Router, assemble
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import from_sources
from deepseek_tgi.router.listener import bind, server_for
from deepseek_tgi.router.model_files import load_model_files
from deepseek_tgi.router.spans import Spans
from deepseek_tgi.router.startup import introduce


@dataclass
class Bench:
    """A router and its shards; `client` is bound to its address."""

    shards: list[FakeShard]
    router: Router
    client: httpx.AsyncClient
    port: int
    batching: asyncio.Task[Any]

    @property
    def shard(self) -> FakeShard:
        return self.shards[0]

    async def post(self, path: str, body: Any, **how: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **how)

    async def events(self, path: str, body: Any) -> list[str]:
        """Payloads of a whole stream, after checking its bytes."""
        async with self.client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/event-stream"
            raw = (await answer.aread()).decode()
        assert raw.endswith("\n\n")
        blocks = raw.removesuffix("\n\n").split("\n\n")
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks), raw
        return [block.removeprefix("data: ") for block in blocks]

    async def json_events(self, path: str, body: Any) -> list[Any]:
        return [json.loads(text) for text in await self.events(path, body) if text != "[DONE]"]

    async def connect(self, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw request, for clients that leave in the middle."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    @property
    def free_blocks(self) -> int:
        assert self.router.scheduler.blocks is not None
        return self.router.scheduler.blocks.available_blocks

    @property
    def in_flight(self) -> int:
        return self.router.state.infer.permits.taken

    async def until(self, condition: Any, what: str = "the condition", timeout_s: float = 10.0) -> None:
        """Wait until `condition()` holds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not condition():
            assert loop.time() < deadline, f"after {timeout_s} s still not: {what}"
            await asyncio.sleep(0.002)


@asynccontextmanager
async def router_bench(
    folder: Path,
    argv: Sequence[str] = (),
    traits: Traits | None = None,
    ranks: int = 1,
    environ: Mapping[str, str] | None = None,
    spans: Spans | None = None,
    control: FakeControl | None = None,
) -> AsyncIterator[Bench]:
    """Start shards and router; at the end nothing may be in flight, no block lost and no fault seen.

    With `control` the shards can change their model, as it says.
    """
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        write_tokenizer(model)
    base = ["--tokenizer-name", str(model), "--master-shard-uds-path", str(folder / "shard-0"), "--port", "0"]
    config = from_sources([*base, *argv], environ or {})
    async with AsyncExitStack() as stack:
        shards = []
        for rank in range(ranks):
            shard = FakeShard(folder / f"shard-{rank}", traits or Traits(), ranks, rank)
            if control is not None:
                control_pb2_grpc.add_ModelControlServicer_to_server(control, shard._server)
            shards.append(await shard.start())
            stack.push_async_callback(shards[-1].stop)
        client = await ShardClient.connect(config.master_shard_uds_path, spans)
        stack.push_async_callback(client.close)
        facts, generation = await introduce(client, config), None if control is None else 1
        router = assemble(config, client, facts, load_model_files(config), generation=generation)
        stack.callback(router.close)
        if router.changes is not None:
            stack.push_async_callback(router.changes.close)
        batching = asyncio.create_task(router.models.run())
        stack.push_async_callback(_cancelled, batching)
        port = await stack.enter_async_context(_served(router))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30))
        bench = Bench(shards, router, http, port, batching)
        yield bench
        await _check_rest(bench)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


@asynccontextmanager
async def _served(router: Router) -> AsyncIterator[int]:
    listener = bind("127.0.0.1", 0)
    server = server_for(router.app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def _check_rest(bench: Bench) -> None:
    blocks = None if bench.router.models.current is None else bench.router.scheduler.blocks
    await bench.until(lambda: bench.in_flight == 0, "no permit is held")
    if blocks is not None:
        await bench.until(lambda: blocks.available_blocks == blocks.usable_blocks, "every block has come back")
        blocks.check_integrity()
    assert not bench.batching.done(), "the batching loop ended"
    for shard in bench.shards:
        await bench.until(lambda s=shard: not s.live, "the shard holds no request")
        assert shard.faults == []


def body(text: str = "hello", new: int = 4, **parameters: Any) -> dict[str, Any]:
    """A native request."""
    return {"inputs": text, "parameters": {"max_new_tokens": new, **parameters}}


async def held(bench: Bench, *bodies: dict[str, Any]) -> list[asyncio.Task[Any]]:
    """Start requests one after the other, so that they queue in this order."""
    scheduler = bench.router.scheduler
    tasks = []
    for wish in bodies:
        number = scheduler._next_entry_id + 1
        tasks.append(asyncio.create_task(bench.post("/generate", wish)))
        await bench.until(partial(_reached, scheduler, number))
    return tasks


def _reached(scheduler: Any, number: int) -> bool:
    return bool(scheduler._next_entry_id == number)
