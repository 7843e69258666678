"""The admin routes: what they take, what they refuse before anything begins, and what they say of the served model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_control import BAD, FakeControl
from router_bench import Bench, router_bench

from deepseek_tgi.pb import fmaas_pb2 as fmaas
from deepseek_tgi.pb import inference_pb2 as oip
from deepseek_tgi.probes.state import Event
from deepseek_tgi.router.fmaas_service import FmaasService
from deepseek_tgi.router.grpc_calls import Calls, Doorkeeper
from deepseek_tgi.router.inference_service import InferenceService
from deepseek_tgi.router.repository import Repository

TOKEN = "t0ken"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def control(tmp_path: Path) -> FakeControl:
    return FakeControl(tmp_path / "model", 16)


@pytest.fixture
async def bench(tmp_path: Path, control: FakeControl) -> AsyncIterator[Bench]:
    environ = {"DEEPSEEK_TGI_ADMIN_TOKEN": TOKEN}
    async with router_bench(tmp_path, ["--served-model-id", "first"], environ=environ, control=control) as bench:
        bench.client.headers.update(HEADERS)
        yield bench


async def serving(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = (await bench.client.get("/admin/models")).json()["serving"]
    return found


@pytest.mark.parametrize("how", [{}, {"content": b""}, {"json": {}}, {"data": {}}], ids=["none", "0", "{}", "form"])
async def test_who_wishes_nothing_special_needs_no_body(bench: Bench, how: dict[str, Any]) -> None:
    for verb, state in (("sleep", "sleeping"), ("wake", "ready")):
        answer = await bench.client.post(f"/admin/models/{verb}", **how)
        assert answer.status_code == 200, answer.text
        assert (await serving(bench))["state"] == state
    assert (await bench.client.post("/admin/models/unload", **how)).status_code == 200
    assert await serving(bench) is None


async def test_a_body_that_is_no_json_is_still_refused(bench: Bench) -> None:
    answer = await bench.client.post("/admin/models/sleep", content=b"drop_weights=true")
    assert answer.status_code == 415
    assert (await bench.client.post("/admin/models/load")).status_code == 422
    assert (await serving(bench))["state"] == "ready"


@pytest.mark.parametrize(
    ("verb", "body", "text"),
    [
        ("load", {"model_id": "m", "manifest_sha265": "00"}, "unknown field `manifest_sha265`, expected one of"),
        ("load", {"model": "m"}, "unknown field `model`"),
        ("sleep", {"drop-weights": True}, "unknown field `drop-weights`, expected one of `drop_weights`"),
        ("wake", {"model_id": "first"}, "unknown field `model_id`, expected one of `stream`"),
        ("load", {"model_id": "m", "stream": "yes"}, "stream: invalid type: string"),
        ("wake", {"stream": 1}, "stream: invalid type: integer"),
    ],
)
async def test_a_misspelt_wish_is_refused_before_anything_begins(
    bench: Bench, control: FakeControl, verb: str, body: dict[str, Any], text: str
) -> None:
    answer = await bench.post(f"/admin/models/{verb}", body)
    assert answer.status_code == 422
    assert text in answer.text
    assert control.calls == []
    assert (await bench.client.get("/admin/models")).json()["history"] == []


@pytest.mark.parametrize("given", ["", "Bearer", f"Bearer {TOKEN}x", TOKEN, f"Bearer  {TOKEN}"])
async def test_who_lacks_the_token_is_told_what_is_expected(bench: Bench, given: str) -> None:
    answer = await bench.client.get("/admin/models", headers={"authorization": given})
    assert answer.status_code == 401
    assert answer.text == "expected `authorization: Bearer TOKEN`, with the admin token"


async def test_a_model_that_cannot_serve_now_is_not_called_ready(bench: Bench) -> None:
    state = bench.router.state
    calls = Calls(Doorkeeper(None, TOKEN, False), state.traffic, state.spans, state.infer)
    service = InferenceService(calls, bench.router.models, bench.router.changes, bench.router.owner)

    async def listed(only_ready: bool) -> list[tuple[str, str, str]]:
        index = await service.RepositoryIndex(oip.RepositoryIndexRequest(ready=only_ready), None)
        return [(each.name, each.state, each.reason) for each in index.models]

    assert await listed(True) == [("first", "READY", "")]
    bench.router.owner.apply(Event.DEGRADE, reason="shard 0 has stood still")
    assert (await serving(bench))["state"] == "degraded"
    assert await listed(True) == []
    assert await listed(False) == [("first", "UNAVAILABLE", "degraded: shard 0 has stood still")]
    bench.router.owner.apply(Event.RECOVER)
    assert (await serving(bench))["state"] == "ready"


async def test_nothing_to_unload_is_said_plainly(bench: Bench) -> None:
    assert (await bench.post("/admin/models/unload", {"model_id": "other"})).json()["error"] == (
        "other is not served; first is"
    )
    assert (await bench.client.post("/admin/models/unload")).status_code == 200
    answer = await bench.client.post("/admin/models/unload")
    assert (answer.status_code, answer.json()["error"]) == (409, "no model is served")


async def test_a_name_that_is_not_in_the_repository_is_refused_with_those_that_are(
    tmp_path: Path, control: FakeControl
) -> None:
    for name in ("small", "large"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    (tmp_path / "models" / "empty").mkdir()
    environ = {"DEEPSEEK_TGI_ADMIN_TOKEN": TOKEN, "DEEPSEEK_TGI_MODEL_REPOSITORY": str(tmp_path / "models")}
    async with router_bench(tmp_path, environ=environ, control=control) as bench:
        bench.client.headers.update(HEADERS)
        for name, said in (("smal", "cut short; the repository holds large, small"), ("small", "cut short")):
            control.outcomes = [BAD]
            error = (await bench.post("/admin/models/load", {"model_id": name})).json()["error"]
            assert error.endswith(said)
    assert [value for name, value in control.calls if name == "load"] == ["smal", str(tmp_path / "models" / "small")]


async def test_the_repository_is_looked_at_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    look = os.path.isfile

    def slow(path: Any) -> bool:
        seen.append(threading.get_ident())
        return look(path)

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    repository = Repository(str(tmp_path))
    monkeypatch.setattr(os.path, "isfile", slow)
    assert await repository.names() == ["one"]
    assert await repository.resolve("one") == str(tmp_path / "one")
    assert seen
    assert threading.get_ident() not in seen
    assert await Repository(str(tmp_path / "gone")).names() == []


async def test_tokenising_goes_on_while_the_model_changes(bench: Bench) -> None:
    state, models = bench.router.state, bench.router.models
    service = FmaasService(Calls(Doorkeeper(None, TOKEN, False), state.traffic, state.spans, state.infer), models)
    texts = [fmaas.TokenizeRequest(text="hello the world " * 2000) for _ in range(40)]
    request = fmaas.BatchedTokenizeRequest(requests=texts, return_offsets=True)
    tokenising: asyncio.Future[Any] = asyncio.ensure_future(service.Tokenize(request, None))
    await asyncio.sleep(0.02)
    assert (await bench.post("/admin/models/load", {"model_id": "other"})).status_code == 200
    assert not tokenising.done(), "it was over before the change: the test shows nothing"
    answer = await tokenising
    counts = {each.token_count for each in answer.responses}
    assert (len(answer.responses), len(counts)) == (40, 1)
    assert max(each.end for each in answer.responses[0].offsets) == len(texts[0].text)


async def test_a_change_goes_on_if_whoever_asked_for_it_leaves(bench: Bench, control: FakeControl) -> None:
    control.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        await bench.client.post("/admin/models/load", json={"model_id": "other"}, timeout=0.2)
    await asyncio.sleep(0.05)
    control.gate.set()
    await bench.until(lambda: bench.router.models.open is not None and bench.router.models.open.name == "other")


async def test_health_asks_no_generation_of_a_server_that_has_no_model(bench: Bench) -> None:
    """After a generation that failed it would: none can succeed, and whoever restarts by it would restart for ever."""
    bench.shard.fail_next["Prefill"] = "boom"
    assert (await bench.post("/generate", {"inputs": "hello"})).status_code == 424
    assert (await bench.client.post("/admin/models/unload")).status_code == 200
    assert (await bench.client.get("/health")).status_code == 200
    assert bench.shard.count("Liveness") == 0
    assert (await bench.post("/admin/models/load", {"model_id": "other"})).status_code == 200
    assert (await bench.client.get("/health")).status_code == 200
    assert bench.shard.count("Liveness") == 1, "the bad news was forgotten"
