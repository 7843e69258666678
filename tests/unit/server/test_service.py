"""The service in process, around a stub engine: states, statuses, dropped batches, calls that come in between."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stub_shard import StubEngine

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb import generate_pb2_grpc
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State
from deepseek_tgi.server.engine_thread import EngineThread
from deepseek_tgi.server.interceptors import CallInterceptor, status_of
from deepseek_tgi.server.models import Source
from deepseek_tgi.server.service import SERVICE, ShardService, first_model
from deepseek_tgi.telemetry.metrics import ShardMetrics
from deepseek_tgi.telemetry.tracing import Tracing

LIVENESS = 2**64 - 1


@dataclass
class Bench:
    """A served stub and a client of it."""

    engine: StubEngine
    state: Owner
    metrics: ShardMetrics
    stub: Any
    fatal: list[BaseException]
    spans: InMemorySpanExporter

    async def warm_up(self) -> pb.WarmupResponse:
        batch = pb.Batch(id=0, requests=[request("x", 0), request("y", 0)])
        answer: pb.WarmupResponse = await self.stub.Warmup(pb.WarmupRequest(batch=batch, max_prefill_tokens=64))
        return answer

    async def prefill(self, text: str, new_tokens: int = 8, batch_id: int = 0) -> pb.PrefillResponse:
        batch = pb.Batch(id=batch_id, requests=[request(text, batch_id, new_tokens)])
        answer: pb.PrefillResponse = await self.stub.Prefill(pb.PrefillRequest(batch=batch))
        return answer


def request(text: str, request_id: int, new_tokens: int = 1) -> pb.Request:
    stop = pb.StoppingCriteriaParameters(max_new_tokens=new_tokens)
    return pb.Request(id=request_id, inputs=text, truncate=16, stopping_parameters=stop)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    engine, state, metrics, thread = StubEngine(), Owner(), ShardMetrics(), EngineThread()
    state.apply(Event.LOAD)
    state.apply(Event.LOADED)
    fatal: list[BaseException] = []
    service = ShardService(first_model(engine, thread, Source("stub"), 1), thread, state, ["unix:///a-0"], metrics)
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    traces = Tracing(provider.get_tracer("test"))
    server = grpc.aio.server(interceptors=[CallInterceptor(SERVICE, service.drop, fatal.append, traces, metrics)])
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(service, server)
    address = f"unix:{tmp_path / 's'}"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield Bench(engine, state, metrics, generate_pb2_grpc.TextGenerationServiceStub(channel), fatal, spans)
    await server.stop(None)
    thread.close()


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_nothing_is_generated_before_the_warmup(bench: Bench) -> None:
    code, text = await failure(bench.prefill("x"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "warming" in text
    await bench.warm_up()
    assert bench.state.state is State.READY
    assert (await bench.prefill("x")).generations


async def test_a_second_router_may_warm_up_again(bench: Bench) -> None:
    await bench.warm_up()
    assert (await bench.warm_up()).max_total_tokens == 4096
    assert bench.state.state is State.READY


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("raise boom", grpc.StatusCode.INTERNAL, "ZeroDivisionError: boom"),
        ("refuse no", grpc.StatusCode.INVALID_ARGUMENT, "no"),
        ("raise \u4f60\u597d", grpc.StatusCode.INTERNAL, "ZeroDivisionError: \u4f60\u597d"),
    ],
)
async def test_an_error_is_a_status_and_the_next_call_works(
    bench: Bench, text: str, code: grpc.StatusCode, message: str
) -> None:
    await bench.warm_up()
    assert await failure(bench.prefill(text)) == (code, message)
    assert (await bench.prefill("x")).generations


async def test_a_failed_call_loses_the_batches_it_named_and_no_other(bench: Bench) -> None:
    await bench.warm_up()
    for batch_id in (0, 1, 2):
        await bench.prefill("x", batch_id=batch_id)
    bad = pb.PrefillRequest(batch=pb.Batch(id=5, requests=[request("raise", 5)]), cached_batch=pb.CachedBatch(id=0))
    await failure(bench.stub.Prefill(bad))
    assert sorted(bench.engine.batches) == [1, 2]
    await failure(bench.stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=1), pb.CachedBatch(id=77)])))
    assert sorted(bench.engine.batches) == [2]


async def test_a_call_refused_before_the_engine_loses_them_too(bench: Bench) -> None:
    await bench.warm_up()
    await bench.prefill("x", batch_id=3)
    bad = pb.PrefillRequest(batch=pb.Batch(id=4, requests=[request("x", 4, 0)]), cached_batch=pb.CachedBatch(id=3))
    code, text = await failure(bench.stub.Prefill(bad))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_new_tokens: got 0" in text
    assert bench.engine.batches == {}


async def test_batch_id_zero_is_an_id(bench: Bench) -> None:
    await bench.warm_up()
    for _ in range(200):
        await bench.prefill("x", batch_id=0)
        await asyncio.gather(
            bench.stub.Health(pb.HealthRequest()),
            bench.stub.ClearCache(pb.ClearCacheRequest(id=9)),
            bench.prefill("x", 1, 7),
        )
        answer = await bench.stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=0)]))
        assert answer.batch.id == 0
    await bench.stub.ClearCache(pb.ClearCacheRequest(id=0))
    assert (await failure(bench.stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=0)]))))[
        0
    ] is grpc.StatusCode.NOT_FOUND


async def test_facts_and_health_answer_during_a_long_step(bench: Bench) -> None:
    await bench.warm_up()
    running = asyncio.ensure_future(bench.prefill("sleep 1.0"))
    while "prefill" not in bench.engine.calls:
        await asyncio.sleep(0.01)
    slowest = 0.0
    while not running.done():
        started = time.perf_counter()
        await bench.stub.Health(pb.HealthRequest())
        await bench.stub.Info(pb.InfoRequest())
        slowest = max(slowest, time.perf_counter() - started)
        await asyncio.sleep(0.02)
    assert slowest < 0.5
    await running
    bench.engine.calls.clear()
    await bench.stub.Health(pb.HealthRequest())
    assert bench.engine.calls == ["health"]  # idle: the device itself is asked


async def test_the_liveness_prefill_comes_between_steps(bench: Bench) -> None:
    await bench.warm_up()
    running = [asyncio.ensure_future(bench.prefill("sleep 0.2", batch_id=i)) for i in range(3)]
    alive = await bench.prefill("liveness", 1, LIVENESS)
    assert alive.generations[0].request_id == LIVENESS
    assert not alive.HasField("batch")
    assert [answer.batch.id for answer in await asyncio.gather(*running)] == [0, 1, 2]


async def test_a_client_that_leaves_takes_its_batches_along(bench: Bench) -> None:
    await bench.warm_up()
    call = asyncio.ensure_future(bench.prefill("sleep 0.3", batch_id=6))
    while "prefill" not in bench.engine.calls:
        await asyncio.sleep(0.01)
    call.cancel()
    while "clear 6" not in bench.engine.calls:
        await asyncio.sleep(0.01)
    assert bench.engine.batches == {}
    assert (await bench.prefill("x")).generations


async def test_a_failed_device_is_reported_and_told(bench: Bench) -> None:
    await bench.warm_up()
    code, text = await failure(bench.prefill("fatal the bus is gone"))
    assert (code, text) == (grpc.StatusCode.INTERNAL, "the bus is gone")
    assert [str(error) for error in bench.fatal] == ["the bus is gone"]


async def test_calls_and_failures_are_counted(bench: Bench) -> None:
    await bench.warm_up()
    await bench.prefill("x")
    await failure(bench.prefill("refuse no"))
    value = bench.metrics.registry.get_sample_value
    assert value("deepseek_tgi_rpc_duration_count", {"method": "Prefill"}) == 2
    failed = {"method": "Prefill", "code": "INVALID_ARGUMENT"}
    assert value("deepseek_tgi_rpc_failure_total", failed) == 1
    assert value("deepseek_tgi_generated_tokens_total") == 1


async def test_a_span_tells_how_its_call_ended(bench: Bench) -> None:
    await bench.warm_up()
    await failure(bench.prefill("refuse no"))
    codes = [
        (dict(s.attributes or {})["rpc.grpc.status_code"], s.status.is_ok) for s in bench.spans.get_finished_spans()
    ]
    assert codes == [(grpc.StatusCode.OK.value[0], True), (grpc.StatusCode.INVALID_ARGUMENT.value[0], False)]


@pytest.mark.parametrize("text", ["\u4f60", "\U0001f600", "%", "\n", "a"])
def test_a_status_message_fits_the_trailers(text: str) -> None:
    _, message = status_of(RuntimeError(text * 100_000))
    assert 5000 < len(quote(message, safe="".join(map(chr, range(32, 127))).replace("%", ""))) < 8192 - 1024
    assert message.startswith("RuntimeError: ")


def test_a_short_status_message_is_left_as_it_is() -> None:
    assert status_of(RuntimeError("50 % of \u4f60"))[1] == "RuntimeError: 50 % of \u4f60"
    assert status_of(RuntimeError("half \ud800"))[1] == "RuntimeError: half ?"


def test_the_server_side_of_a_shard_needs_no_torch() -> None:
    import subprocess

    code = "import sys, deepseek_tgi.server.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
