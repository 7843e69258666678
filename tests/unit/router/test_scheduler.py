"""The batching loop over loopback: what the shard is asked, in which order, and what clients who leave or fail cost."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from fake_script import Traits
from fake_shard import FakeShard
from router_bench import Bench, body, held, router_bench


def steps(shard: FakeShard) -> list[str]:
    """Names of the calls after start."""
    names = [name for name, _ in shard.calls]
    return names[names.index("Warmup") + 1 :]


async def test_start_up_conversation(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-batch-prefill-tokens", "100", "--max-input-tokens", "40"]) as bench:
        assert [name for name, _ in bench.shard.calls] == ["ServiceDiscovery", "ClearCache", "Info", "Warmup"]
        assert bench.shard.calls[1] == ("ClearCache", None)
        warmup = bench.shard.warmup
    assert warmup is not None
    assert [r.truncate for r in warmup.batch.requests] == [40, 40, 20]
    assert (warmup.max_input_tokens, warmup.max_prefill_tokens, warmup.HasField("max_total_tokens")) == (40, 100, False)
    first, second = warmup.batch.requests[:2]
    assert [c.WhichOneof("chunk") for c in first.input_chunks.chunks] == ["text", "image"]
    assert [c.WhichOneof("chunk") for c in second.input_chunks.chunks] == ["text"]
    assert {r.id for r in warmup.batch.requests} == {0}
    assert first.inputs == "_test " * 40
    assert first.stopping_parameters.ignore_eos_token
    assert (first.prefill_logprobs, first.top_n_tokens, len(first.blocks), len(first.slots)) == (True, 20, 0, 0)
    assert (first.parameters.watermark, first.parameters.do_sample, first.parameters.top_k) == (True, False, 10)


async def test_one_request_is_a_prefill_and_decodes(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        await bench.post("/generate", body(new=3))
        assert steps(bench.shard) == ["Prefill", "Decode", "Decode"]
        assert [detail for name, detail in bench.shard.calls if name == "Decode"] == [[0], [0]]


async def test_newcomers_join_by_a_prefill_that_names_the_running_batch(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("one", 5))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        tasks += await held(bench, body("two", 5))
        bench.shard.gate.set()
        await asyncio.gather(*tasks)
        prefills = [detail for name, detail in bench.shard.calls if name == "Prefill"]
        text = (await bench.client.get("/metrics")).text
    assert prefills == [(0, [0], None), (1, [1], 0)]
    assert 'tgi_batch_concat{reason="chunking"} 1' in text


async def test_without_chunking_newcomers_are_prefilled_alone_and_decoded_together(tmp_path: Path) -> None:
    argv = ["--waiting-served-ratio", "1.0"]
    async with router_bench(tmp_path, argv, Traits(support_chunking=False)) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("one", 6))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        tasks += await held(bench, body("two", 6))
        bench.shard.gate.set()
        await asyncio.gather(*tasks)
        prefills = [detail for name, detail in bench.shard.calls if name == "Prefill"]
        decodes = [detail for name, detail in bench.shard.calls if name == "Decode"]
    assert prefills == [(0, [0], None), (1, [1], None)]
    assert [0, 1] in decodes


async def test_without_chunking_too_few_waiting_stay_until_they_waited_long_enough(tmp_path: Path) -> None:
    argv = ["--waiting-served-ratio", "2.0", "--max-waiting-tokens", "3"]
    async with router_bench(tmp_path, argv, Traits(support_chunking=False)) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("one", 9))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        tasks += await held(bench, body("two", 2))
        bench.shard.gate.set()
        await asyncio.gather(*tasks)
        order = [name for name in steps(bench.shard) if name in {"Prefill", "Decode"}]
        text = (await bench.client.get("/metrics")).text
    assert order[:4] == ["Prefill", "Decode", "Decode", "Prefill"]
    assert 'tgi_batch_concat{reason="wait_exceeded"} 1' in text


async def test_a_prompt_over_the_budget_is_cut_and_decoding_goes_on_meanwhile(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-batch-prefill-tokens", "32"]) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("first", 12))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        tasks += await held(bench, body("short", 12), body("x" * 160, 3), body("later", 2))
        bench.shard.gate.set()
        answers = await asyncio.gather(*tasks)
        _, short, long, later = bench.shard.requests
        second = next(detail for name, detail in bench.shard.calls if name == "Prefill" and detail[0] == 1)
    assert [a.status_code for a in answers] == [200] * 4
    assert second == (1, [1, 2], 0), "the cut one ends the batch"
    assert not short.HasField("chunk_len")
    # 32 less the one token of the running request, rounded up to a block, less the six of the short prompt.
    assert long.chunk_len == 32 - 6
    assert later.id == 3


async def test_max_batch_size_holds(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--max-batch-size", "2"]) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, *(body(f"r{i}", 5) for i in range(5)))
        bench.shard.gate.set()
        await asyncio.gather(*tasks)
        assert max(len(detail[1]) for name, detail in bench.shard.calls if name == "Prefill") <= 2
        sizes = [len(r) for r in (d for n, d in bench.shard.calls if n == "Decode")]
        assert sizes
        assert bench.shard.count("Prefill") >= 3


async def test_requests_wait_for_blocks_and_none_is_lost(tmp_path: Path) -> None:
    traits = Traits(num_blocks=9, max_total_tokens=120)  # eight usable blocks
    async with router_bench(tmp_path, ["--max-batch-prefill-tokens", "64"], traits) as bench:
        wishes = [body("x" * 30 + str(i), 50) for i in range(6)]  # six blocks each
        answers = await asyncio.gather(*(bench.post("/generate", wish) for wish in wishes))
        assert [a.status_code for a in answers] == [200] * 6


async def test_a_request_that_no_cache_could_hold_is_refused_at_once(tmp_path: Path) -> None:
    traits = Traits(num_blocks=9, max_total_tokens=1000)
    async with router_bench(tmp_path, ["--max-batch-prefill-tokens", "64"], traits) as bench:
        info = (await bench.client.get("/info")).json()
        refused = await bench.post("/generate", body("x" * 100, 100))
        largest = await bench.post("/generate", body("x" * 27, 101))
        answer = await bench.post("/generate", body("x", 2))
    assert info["max_total_tokens"] == 8 * 16 + 1, "eight blocks; the last token is never stored"
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    assert (largest.status_code, answer.status_code) == (200, 200)


async def test_a_repeated_prompt_is_not_computed_again(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        for _ in range(2):
            await bench.post("/generate", body("x" * 40, 2))
        await bench.post("/generate", body("x" * 31 + "y" * 9, 2))
        await bench.post("/generate", body("x" * 40, 2, decoder_input_details=True))
        assert [r.cache_len for r in bench.shard.requests] == [0, 32, 32, 0]
        text = (await bench.client.get("/metrics")).text
    assert "deepseek_tgi_prompt_tokens_reused 64" in text


async def test_a_prompt_whose_prefill_failed_is_not_reused(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        bench.shard.fail_next["Prefill"] = "boom"
        assert (await bench.post("/generate", body("x" * 40))).status_code == 424
        assert (await bench.post("/generate", body("x" * 40))).status_code == 200
        assert [r.cache_len for r in bench.shard.requests] == [0]


async def joined_by_a_failing_prefill(bench: Bench) -> list[int]:
    """Statuses of a running request and of one whose Prefill fails."""
    bench.shard.gate.clear()
    tasks = await held(bench, body("one", 9))
    await bench.until(lambda: bench.shard.count("Prefill") == 1)
    tasks += await held(bench, body("two", 9))
    bench.shard.skip_failures = 1
    bench.shard.fail_next["Prefill"] = "boom"
    bench.shard.gate.set()
    return [answer.status_code for answer in await asyncio.gather(*tasks)]


async def test_a_failed_prefill_ends_all_in_play_and_clears_both_batches(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        assert await joined_by_a_failing_prefill(bench) == [424, 424]
        await bench.until(lambda: bench.shard.count("ClearCache") == 3)
        assert [detail for name, detail in bench.shard.calls if name == "ClearCache"] == [None, 1, 0]
        assert (await bench.post("/generate", body("three", 2))).status_code == 200


async def test_without_chunking_a_failed_prefill_leaves_the_running_batch_alone(tmp_path: Path) -> None:
    argv = ["--waiting-served-ratio", "0.5"]
    async with router_bench(tmp_path, argv, Traits(support_chunking=False)) as bench:
        assert await joined_by_a_failing_prefill(bench) == [200, 424]
        assert [detail for name, detail in bench.shard.calls if name == "ClearCache"] == [None, 1]


async def test_a_filter_that_fails_ends_its_requests_and_nothing_else(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("short", 2), body("long", 9))
        bench.shard.fail_next["FilterBatch"] = "no"
        bench.shard.gate.set()
        short, long = await asyncio.gather(*tasks)
        assert (short.status_code, long.status_code) == (200, 424)
        assert (await bench.post("/generate", body("next", 3))).status_code == 200


async def test_a_request_the_shard_gives_up_is_an_error_and_its_neighbours_go_on(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("one lose[3]", 9), body("two", 9))
        bench.shard.gate.set()
        lost, other = await asyncio.gather(*tasks)
        assert (lost.status_code, lost.json()["error_type"]) == (424, "generation")
        assert lost.json()["error"].startswith("Request failed during generation: Server error: the shard gave this")
        assert other.json()["generated_text"] == "".join(f"w{n} " for n in range(9))
        streamed = await bench.post("/generate_stream", body("one lose[2]", 9))
        events = [line for line in streamed.text.splitlines() if line]
        assert len(events) == 2
        assert '"error_type":"generation"' in events[1]


async def test_a_prompt_given_up_at_its_first_token_is_not_reused(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        prompt = "lose[1]" + "x" * 40
        assert [(await bench.post("/generate", body(prompt))).status_code for _ in range(2)] == [424, 424]
        assert [r.cache_len for r in bench.shard.requests] == [0, 0]


async def test_finished_requests_are_filtered_out(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("a", 4), body("b", 9), body("c", 9))
        bench.shard.gate.set()
        await asyncio.gather(*tasks)
        kept = [detail for name, detail in bench.shard.calls if name == "FilterBatch"]
    assert (0, [1, 2]) in kept


async def test_a_batch_that_vanishes_is_told_as_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_bench(tmp_path) as bench:
        real = FakeShard._finish

        def forgetful(shard: FakeShard, answer: Any, batch_id: int, running: Any, kept: Any) -> Any:
            found = real(shard, answer, batch_id, running, kept)
            found.ClearField("batch")
            shard.batches.pop(batch_id, None)
            return found

        monkeypatch.setattr(FakeShard, "_finish", forgetful)
        whole = await bench.post("/generate", body())
        streamed = await bench.json_events("/generate_stream", body())
    assert (whole.status_code, whole.json()) == (
        500,
        {"error": "Incomplete generation", "error_type": "incomplete_generation"},
    )
    assert streamed[-1] == {"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"}


async def test_the_next_step_is_asked_for_before_clients_get_the_last_one(tmp_path: Path) -> None:
    """While the shard holds step n back, the tokens of step n-1 have reached the client."""
    async with router_bench(tmp_path) as bench:
        bench.shard.gate.clear()
        reader, writer = await bench.connect("/generate_stream", body(new=3))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        for step in (1, 2):
            bench.shard.gate.set()
            bench.shard.gate.clear()  # lets exactly the step pass that waits
            await bench.until(lambda n=step: bench.shard.count("Decode") == n)
            await reader.readuntil(b'"index":%d,' % step)
        bench.shard.gate.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def test_many_requests_of_mixed_lengths_all_get_their_own_text(tmp_path: Path) -> None:
    argv = ["--max-batch-prefill-tokens", "48"]
    async with router_bench(tmp_path, argv, Traits(num_blocks=60)) as bench:
        dice = random.Random(5)
        wishes = [(f"{'p' * dice.randrange(1, 90)}say[{i}|{i}]", 9) for i in range(60)]
        answers = await asyncio.gather(*(bench.post("/generate", body(text, new)) for text, new in wishes))
        assert [a.json()["generated_text"] for a in answers] == [f"{i}{i}" for i in range(60)]
        assert all(name in {"Prefill", "Decode", "FilterBatch", "ClearCache"} for name in steps(bench.shard))
        ids = list(itertools.chain.from_iterable(d[1] for n, d in bench.shard.calls if n == "Prefill"))
        assert ids == sorted(set(ids)), "ids count up and are used once"


async def test_a_shard_that_pads_gets_no_blocks_and_batches_by_padded_length(tmp_path: Path) -> None:
    traits = Traits(requires_padding=True, support_chunking=False, use_prefix_caching=False, num_blocks=40)
    async with router_bench(
        tmp_path, ["--max-batch-prefill-tokens", "64", "--max-input-tokens", "64"], traits
    ) as bench:
        bench.shard.gate.clear()
        tasks = await held(bench, body("first", 3))
        await bench.until(lambda: bench.shard.count("Prefill") == 1)
        tasks += await held(bench, body("x" * 30, 3), body("y", 3), body("z", 3))
        bench.shard.gate.set()
        answers = await asyncio.gather(*tasks)
        prefills = [detail[1] for name, detail in bench.shard.calls if name == "Prefill"]
        assert all(len(r.blocks) == len(r.slots) == r.cache_len == 0 for r in bench.shard.requests)
    assert [a.status_code for a in answers] == [200] * 4
    assert prefills[1] == [1, 2], "two padded to 31 tokens fit into 64, three do not"
