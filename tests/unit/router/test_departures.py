"""Clients that leave, at every stage: their requests go, their blocks and permits come back, neighbours go on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from fake_script import Traits
from router_bench import Bench, body, held, router_bench


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/v1/chat/completions"])
async def test_c36_a_client_that_leaves_takes_its_request_along(tmp_path: Path, path: str) -> None:
    async with router_bench(tmp_path, traits=Traits(max_total_tokens=4000)) as bench:
        neighbour = asyncio.create_task(bench.post("/generate", body("neighbour", 60)))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        wish = {**body("leaver", 1000), "messages": [{"role": "user", "content": "x"}], "max_tokens": 1000}
        reader, writer = await bench.connect(path, wish)
        if path == "/generate_stream":
            for _ in range(3):
                await reader.readuntil(b"data: ")
        await bench.until(lambda: len(bench.shard.live) == 2)
        bench.shard.gate.clear()
        writer.close()
        await bench.until(lambda: bench.in_flight == 1, "the permit is back")
        mark = len(bench.shard.calls)
        bench.shard.gate.set()
        await bench.until(lambda: len(bench.shard.live) <= 1, "the request left")
        after = [name for name, _ in bench.shard.calls[mark:]]
        assert after.index("FilterBatch") <= 1, "it leaves after the step that was under way"
        answer = await neighbour
        assert answer.json() == {"generated_text": "".join(f"w{i} " for i in range(60))}
        assert "deepseek_tgi_request_cancelled 1" in (await bench.client.get("/metrics")).text


async def test_a_client_that_leaves_with_a_very_long_prompt_frees_its_place(tmp_path: Path) -> None:
    traits = Traits(num_blocks=3000, max_total_tokens=40_000)
    async with router_bench(tmp_path, ["--max-batch-prefill-tokens", "16384"], traits) as bench:
        _, writer = await bench.connect("/generate", body("z" * 16_000, 10_000))
        await bench.until(lambda: bench.shard.count("Decode") > 2)
        writer.close()
        await bench.until(lambda: bench.in_flight == 0, "the permit is back")


async def test_a_client_that_leaves_the_queue_is_gone_at_once(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("first", 3))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        _, writer = await bench.connect("/generate", body("second", 3))
        await bench.until(lambda: len(bench.router.scheduler._queue) == 1)
        writer.close()
        await bench.until(lambda: len(bench.router.scheduler._queue) == 0, "it left the queue")
        bench.shard.gate.set()
        await asyncio.gather(*tasks)
        assert [r.inputs for r in bench.shard.requests] == ["first"]
        assert 'tgi_request_failure{err="dropped"} 1' in (await bench.client.get("/metrics")).text


async def test_a_client_that_leaves_in_mid_prefill_is_dropped_before_its_first_token(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-batch-prefill-tokens", "16"]) as bench:
        tasks = [asyncio.create_task(bench.post("/generate", body("keep", 40)))]
        await bench.until(lambda: bench.shard.count("Decode") >= 1)
        _, writer = await bench.connect("/generate", body("y" * 400, 5))
        await bench.until(lambda: len(bench.shard.requests) == 2)
        bench.shard.gate.clear()
        writer.close()
        await bench.until(lambda: bench.in_flight == 1)
        bench.shard.gate.set()
        answers = await asyncio.gather(*tasks)
        assert answers[0].status_code == 200
        assert (1, 1) not in bench.shard.reported, "no token was made for it"


async def test_c37_a_hundred_rounds_of_every_ending_leak_nothing(tmp_path: Path) -> None:
    dice = random.Random(11)
    argv = ["--max-concurrent-requests", "4", "--max-batch-prefill-tokens", "64"]
    async with router_bench(tmp_path, argv, Traits(num_blocks=40)) as bench:
        for _ in range(100):
            await _round(bench, dice)
        await bench.until(lambda: bench.in_flight == 0, "no permit is held")
        assert (await bench.client.get("/health")).status_code == 200
        answers = await asyncio.gather(*(bench.post("/generate", body(f"end {i}", 3)) for i in range(4)))
        assert [a.status_code for a in answers] == [200] * 4
        assert "deepseek_tgi_requests_in_flight 0" in (await bench.client.get("/metrics")).text


async def _round(bench: Bench, dice: random.Random) -> None:
    """Success, refusal, a client that leaves the queue or the stream, a shard error: in any order, at once."""
    kinds = dice.sample(["success", "refusal", "queued", "stream", "error"], k=4)
    writers = []
    tasks = []
    for kind in kinds:
        text = kind + "z" * dice.randrange(60)
        if kind == "success":
            tasks.append(bench.post("/generate", body(text, 3)))
        elif kind == "refusal":
            tasks.append(bench.post("/generate", body(text, 3, temperature=0)))
        elif kind == "error":
            bench.shard.fail_next[dice.choice(["Prefill", "Decode", "FilterBatch"])] = "drawn"
            tasks.append(bench.post("/generate", body(text, 4)))
        else:
            reader, writer = await bench.connect("/generate_stream", body(text, 200))
            if kind == "stream":
                await reader.readuntil(b"\r\n\r\n")
            writers.append(writer)
    waiting = asyncio.gather(*tasks)
    await asyncio.sleep(dice.random() * 0.01)
    for writer in writers:
        writer.close()
    assert {answer.status_code for answer in await waiting} <= {200, 422, 424, 429}
    bench.shard.fail_next.clear()
