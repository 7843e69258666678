"""Raw connections: pipelining, upgrades, and heads without end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_script import Traits
from router_bench import Bench, body, router_bench

INFO = b"GET /info HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with router_bench(tmp_path, traits=Traits(max_total_tokens=4000)) as found:
        yield found


def post(path: str, wish: object, head: str = "") -> bytes:
    data = json.dumps(wish).encode()
    lines = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n{head}"
    )
    return lines.encode() + b"\r\n" + data


async def connection(bench: Bench, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(data)
    return reader, writer


async def flood(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Send `piece` until the server hangs up; how many bytes it took."""
    for sent in range(0, 64 << 20, len(piece)):
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            return sent
    raise AssertionError("the server reads for ever")


async def test_pipelined_requests_are_answered_in_order(bench: Bench) -> None:
    reader, writer = await connection(bench, post("/generate", body(new=3)) + INFO + post("/generate", body(new=1)))
    found = [await reader.readuntil(b"}") for _ in range(3)]
    assert [piece.rpartition(b"\r\n")[2][:17] for piece in found] == [
        b'{"generated_text"',
        b'{"model_id":"%s' % str(bench.router.state.config.model_id).encode()[:4],
        b'{"generated_text"',
    ]
    writer.close()


@pytest.mark.parametrize("behind", [INFO, INFO * 3, post("/generate", body(new=1000))])
async def test_a_client_that_leaves_with_requests_pipelined_is_gone_for_all(bench: Bench, behind: bytes) -> None:
    _, writer = await connection(bench, post("/generate_stream", body(new=3000)) + behind)
    await bench.until(lambda: bench.shard.count("Decode") > 3)
    bench.shard.gate.clear()
    writer.close()
    await bench.until(lambda: bench.in_flight == 0, "the permit is back")
    bench.shard.gate.set()
    await bench.until(lambda: not bench.shard.live)
    assert len(bench.shard.requests) == 1


@pytest.mark.parametrize("behind", [INFO * 40, post("/tokenize", {"inputs": "x" * 100_000})])
async def test_what_is_pipelined_must_be_little(bench: Bench, behind: bytes) -> None:
    reader, writer = await connection(bench, post("/generate_stream", body(new=3000)) + behind)
    await asyncio.wait_for(reader.read(), 20)
    await bench.until(lambda: bench.in_flight == 0)
    writer.close()


async def test_an_offer_to_upgrade_is_ignored_and_its_body_read(bench: Bench) -> None:
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n"
    reader, writer = await connection(bench, post("/generate", body("say[Upgrade: it]"), offer))
    assert (await reader.readline()).split()[1] == b"200"
    assert b'{"generated_text":"Upgrade: it"}' in await reader.readuntil(b"}")
    writer.write(INFO)
    assert (await reader.readline()).split()[1] == b"200", "the connection goes on in HTTP/1.1"
    writer.close()


@pytest.mark.parametrize("piece", [b"x: y\r\n" * 1000, b"a" * 6000], ids=["many", "long"])
async def test_a_head_without_end_is_refused(bench: Bench, piece: bytes) -> None:
    _, writer = await connection(bench, b"GET /info HTTP/1.1\r\nhost: x\r\nx: ")
    assert await flood(writer, piece) < 16 << 20


async def test_a_head_that_is_too_large_gets_431(bench: Bench) -> None:
    reader, writer = await connection(bench, b"GET /info HTTP/1.1\r\nx: " + b"a" * 66_000)
    assert await reader.readline() == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    writer.close()


async def test_trailers_without_end_are_refused_and_tiny_chunks_are_not(bench: Bench) -> None:
    start = (
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    data = json.dumps(body("x" * 200, new=1)).encode().ljust(50_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
    reader, writer = await connection(bench, start + chunks + b"0\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    _, writer = await connection(bench, start + b"2\r\n{}\r\n0\r\n")
    assert await flood(writer, b"x: y\r\n" * 1000) < 16 << 20
