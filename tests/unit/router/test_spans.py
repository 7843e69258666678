"""Traces: requests are children of their client's span, calls carry their own trace and link back; off means off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_shard import FakeShard
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from router_bench import router_bench

from deepseek_tgi.router.spans import Spans

TRACE, PARENT = "a" * 32, "b" * 16


@pytest.fixture
def traceparents(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """`traceparent` of each call that reaches the shard."""
    found: list[tuple[str, str | None]] = []
    real = FakeShard._enter

    async def noting(shard: FakeShard, call: str, detail: Any, context: Any, *rest: Any) -> None:
        found.append((call, dict(context.invocation_metadata()).get("traceparent")))
        await real(shard, call, detail, context, *rest)

    monkeypatch.setattr(FakeShard, "_enter", noting)
    return found


async def test_a_request_and_its_calls(tmp_path: Path, traceparents: list[tuple[str, str | None]]) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with router_bench(tmp_path, spans=Spans(provider.get_tracer("test"))) as bench:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await bench.post("/generate", body, headers=headers)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request, prefill = spans["/generate"], spans["Prefill"]
    assert request.context is not None
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert prefill.parent is None
    assert [link.context.span_id for link in prefill.links] == [request.context.span_id]
    sent = dict(traceparents)["Prefill"]
    assert prefill.context is not None
    assert str(sent).startswith(f"00-{prefill.context.trace_id:032x}-{prefill.context.span_id:016x}-0")
    assert all(
        parent is not None and re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-9]", parent)
        for _, parent in traceparents[1:]
    )


async def test_without_an_endpoint_calls_carry_nothing(
    tmp_path: Path, traceparents: list[tuple[str, str | None]]
) -> None:
    async with router_bench(tmp_path) as bench:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await bench.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 2}}, headers=headers)
    assert {parent for _, parent in traceparents} == {None}


async def test_a_traceparent_that_is_none_is_ignored(tmp_path: Path) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    async with router_bench(tmp_path, spans=Spans(provider.get_tracer("test"))) as bench:
        answer = await bench.post("/generate", {"inputs": "say[x]"}, headers={"traceparent": "ff-nonsense"})
    assert answer.status_code == 200
