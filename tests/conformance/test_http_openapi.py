"""The OpenAPI document against what the server does."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from fake_control import FakeControl
from router_bench import Bench, router_bench
from tiny_tokenizer import write_tokenizer

PAGES = {("/docs", "get"), ("/api-doc/openapi.json", "get")}


async def document(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = (await bench.client.get("/api-doc/openapi.json")).json()
    return found


def admin_bench(folder: Path, token: str = "") -> AbstractAsyncContextManager[Bench]:
    """A router whose shards can change their model."""
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        write_tokenizer(model)
    return router_bench(folder, environ={"DEEPSEEK_TGI_ADMIN_TOKEN": token}, control=FakeControl(model, 16))


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


async def test_admin_routes_are_described_where_they_exist_and_nowhere_else(tmp_path: Path) -> None:
    async with admin_bench(tmp_path, "t") as bench:
        found = await document(bench)
        served = {(path, method.lower()) for method, path in bench.router.table}
    assert operations(found).keys() == served - PAGES
    assert len([path for path in found["paths"] if path.startswith("/admin/")]) == 5
    async with admin_bench(tmp_path) as bench:
        plain = await document(bench)
    assert "admin" not in str(plain).lower()
    for path in list(found["paths"]):
        if path.startswith("/admin/"):
            del found["paths"][path]
    del found["components"]["securitySchemes"]
    for name in found["components"]["schemas"].keys() - plain["components"]["schemas"].keys():
        del found["components"]["schemas"][name]
    assert found == plain, "the rest is as it is without them"


async def test_admin_answers_are_of_the_shapes_that_the_document_gives(tmp_path: Path) -> None:
    bearer = {"authorization": "Bearer t"}
    async with admin_bench(tmp_path, "t") as bench:
        found = await document(bench)
        told = [
            ("/admin/models", await bench.client.get("/admin/models", headers=bearer)),
            *[
                (f"/admin/models/{verb}", await bench.post(f"/admin/models/{verb}", body, headers=bearer))
                for verb, body in (
                    ("load", {"model_id": "other"}),
                    ("sleep", {"keep_pages": True}),
                    ("wake", {}),
                    ("unload", {}),
                    ("wake", {}),
                    ("load", {"model": "other"}),
                )
            ],
            ("/admin/models", await bench.client.get("/admin/models", headers=bearer)),
            ("/admin/models", await bench.client.get("/admin/models")),
        ]
    assert [answer.status_code for _, answer in told] == [200, 200, 200, 200, 200, 409, 422, 200, 401]
    for path, answer in told:
        ((operation),) = found["paths"][path].values()
        assert operation["security"] == [{"admin": []}]
        content = operation["responses"][str(answer.status_code)].get("content", {})
        if "application/json" in content and answer.headers["content-type"] == "application/json":
            schema = {**content["application/json"]["schema"], "components": found["components"]}
            jsonschema.validate(answer.json(), schema)
            name = schema["$ref"].rsplit("/", 1)[1]
            assert answer.json().keys() == found["components"]["schemas"][name]["properties"].keys()


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
