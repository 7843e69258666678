"""The OpenAPI document against what the server does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from router_bench import Bench, router_bench

PAGES = {("/docs", "get"), ("/api-doc/openapi.json", "get")}


async def document(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = (await bench.client.get("/api-doc/openapi.json")).json()
    return found


def operations(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(path, method): op for path, methods in found["paths"].items() for method, op in methods.items()}


async def test_every_route_is_described_and_no_other(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        found = await document(bench)
        served = {(path, method.lower()) for method, path in bench.router.table}
    assert operations(found).keys() == served - PAGES
    names = set(re.findall(r"#/components/schemas/(\w+)", str(found)))
    assert names <= found["components"]["schemas"].keys()
    assert "security" not in found


async def test_the_key_is_asked_for_where_the_document_says_so(tmp_path: Path) -> None:
    async with router_bench(tmp_path, ["--api-key", "k"]) as bench:
        found = await document(bench)
        for (path, method), operation in operations(found).items():
            answer = await bench.client.request(method.upper(), path)
            closed = operation.get("security", found["security"]) == [{"bearer": []}]
            assert (answer.status_code == 401) == closed == ("401" in operation["responses"]), (path, method)


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b" " * 600, "application/json", 413),
        (b"{}", "text/plain", 415),
        (b"{}", "application/json", 422),
        (b'{"inputs":""}', "application/json", 422),
        (b'{"inputs":"say[a]"}', "application/json", 200),
    ],
)
async def test_an_answer_is_of_a_kind_that_the_document_lists(
    tmp_path: Path, data: bytes, kind: str, status: int
) -> None:
    async with router_bench(tmp_path, ["--payload-limit", "500"]) as bench:
        found = await document(bench)
        answer = await bench.client.post("/generate", content=data, headers={"content-type": kind})
    assert answer.status_code == status
    listed = operations(found)["/generate", "post"]["responses"][str(status)]["content"]
    assert answer.headers["content-type"].split(";")[0] in listed


async def test_probes_say_that_they_may_fail(tmp_path: Path) -> None:
    async with router_bench(tmp_path) as bench:
        found = operations(await document(bench))
    for path in ("/", "/health", "/ping", "/ready"):
        assert "503" in found[path, "get"]["responses"]
