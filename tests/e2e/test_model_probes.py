"""What probes say while the model of a running server is changed: HTTP and gRPC, the server and the model by name."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import tiny_checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc
from launched_server import LaunchedServer, free_port
from probe_watch import ProbeWatch

TOKEN = "let-me-change-models"
STATUS = health_pb2.HealthCheckResponse


@dataclass
class Site:
    """A server whose models change, a prober at its probe port and a channel to its gRPC port."""

    server: LaunchedServer
    probe_port: int
    channel: grpc.Channel
    repository: Path

    def admin(self, what: str, **body: Any) -> int:
        answer = self.server.http.post(
            f"{self.server.url}/admin/models/{what}",
            json=body, headers={"authorization": f"Bearer {TOKEN}"}, timeout=120,
        )  # fmt: skip
        code: int = answer.status_code
        return code

    def change(self, what: str, **body: Any) -> None:
        """A change that must succeed; one that comes while an old model is still being unloaded is asked for again."""
        deadline = time.monotonic() + 30
        while (status := self.admin(what, **body)) != 200:
            assert status == 409, status
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def check(self, name: str) -> int | None:
        """The status of a name; None if nobody stands behind it."""
        listed = health_pb2_grpc.HealthStub(self.channel).List(health_pb2.HealthListRequest(), timeout=10).statuses
        if name not in listed:
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                self._check(name)
            return None
        status = self._check(name)
        assert status == listed[name].status
        return status

    def _check(self, name: str) -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        status: int = health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=10).status
        return status


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("probed")
    repository = folder / "models"
    for name, seed in (("one", 1), ("two", 2)):
        tiny_checkpoint(repository / name, "llama", "awq-gemm", seed=seed)
    shutil.copytree(repository / "two", repository / "spoiled")
    weights = repository / "spoiled" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    probe_port, grpc_port = free_port(), free_port()
    environment = {
        "DEEPSEEK_TGI_ADMIN_TOKEN": TOKEN,
        "DEEPSEEK_TGI_MODEL_REPOSITORY": str(repository),
        "DEEPSEEK_TGI_GRPC_PORT": str(grpc_port),
    }
    extra = ["--max-total-tokens", "256", "--max-input-tokens", "200", "--kv-memory", "4MiB", "--dtype", "float32"]
    extra += ["--max-batch-prefill-tokens", "256", "--probe-port", str(probe_port)]
    server = LaunchedServer.start(repository / "one", folder, extra, environment)
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        yield Site(server, probe_port, channel, repository)
    server.stop()


@pytest.fixture
def watch(site: Site) -> Iterator[ProbeWatch]:
    """A prober of a server that serves the first model."""
    site.change("load", model_id="one")
    with ProbeWatch(site.probe_port) as prober:
        prober.wait("readyz", 200, 10)
        yield prober


def test_a_swap_beside_is_ready_all_along_and_the_name_changes_hands(site: Site, watch: ProbeWatch) -> None:
    assert (site.check("one"), site.check("two")) == (STATUS.SERVING, None)
    site.change("load", model_id="two")
    assert (site.check("one"), site.check("two"), site.check("")) == (None, STATUS.SERVING, STATUS.SERVING)
    time.sleep(0.6)
    assert watch.seen("readyz") == [200]
    assert (watch.seen("livez"), watch.seen("startupz")) == ([200], [200])


def test_nothing_is_ready_while_a_model_loads_in_place(site: Site, watch: ProbeWatch) -> None:
    site.change("load", model_id="two", plan="drain")
    watch.wait("readyz", 200, 5)
    assert watch.seen("readyz") == [200, 503, 200]
    fell = next(change for change in watch.changes if change.status == 503)
    assert "[-]model failed: loading" in fell.text
    assert (watch.seen("livez"), watch.seen("startupz")) == ([200], [200])


def test_a_load_that_fails_in_place_is_not_ready_until_the_old_one_is_back(site: Site, watch: ProbeWatch) -> None:
    assert site.admin("load", model_id="spoiled", plan="drain") != 200
    watch.wait("readyz", 200, 5)
    assert watch.seen("readyz")[0] == 200
    assert watch.seen("readyz")[-1] == 200
    assert set(watch.seen("livez")) == {200}
    assert (site.check("one"), site.check("spoiled")) == (STATUS.SERVING, None)


def test_a_load_that_fails_beside_changes_nothing(site: Site, watch: ProbeWatch) -> None:
    assert site.admin("load", model_id="spoiled", plan="beside") != 200
    time.sleep(0.3)
    assert watch.seen("readyz") == [200]


def test_an_unloaded_server_is_live_and_not_ready(site: Site, watch: ProbeWatch) -> None:
    site.change("unload")
    assert "[-]model failed: unloaded" in watch.wait("readyz", 503, 5).text
    assert (site.check(""), site.check("one")) == (STATUS.NOT_SERVING, None)
    time.sleep(1.0)
    assert watch.seen("livez") == [200]
    site.change("load", model_id="two")
    watch.wait("readyz", 200, 5)
    assert (site.check(""), site.check("two")) == (STATUS.SERVING, STATUS.SERVING)


def test_a_sleeping_server_is_live_and_not_ready(site: Site, watch: ProbeWatch) -> None:
    site.change("sleep")
    assert "[-]model failed: sleeping" in watch.wait("readyz", 503, 5).text or watch.status("readyz") == 503
    assert (site.check(""), site.check("one")) == (STATUS.NOT_SERVING, STATUS.NOT_SERVING)
    time.sleep(1.0)
    assert watch.seen("livez") == [200]
    site.change("wake")
    watch.wait("readyz", 200, 5)
    assert site.check("") == STATUS.SERVING


def test_watch_pushes_each_change(site: Site, watch: ProbeWatch) -> None:
    told: queue.Queue[int] = queue.Queue()
    stream = health_pb2_grpc.HealthStub(site.channel).Watch(health_pb2.HealthCheckRequest())

    def listen() -> None:
        try:
            for answer in stream:
                told.put(answer.status)
        except grpc.RpcError:
            return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert told.get(timeout=10) == STATUS.SERVING
    site.change("load", model_id="two", plan="drain")
    assert [told.get(timeout=10) for _ in range(2)] == [STATUS.NOT_SERVING, STATUS.SERVING]
    stream.cancel()
    thread.join(5)


def test_list_tells_the_server_its_services_and_its_model(site: Site, watch: ProbeWatch) -> None:
    listed = health_pb2_grpc.HealthStub(site.channel).List(health_pb2.HealthListRequest(), timeout=10).statuses
    assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
        [
            *("", "one", "fmaas.GenerationService", "inference.GRPCInferenceService"),
            "generate.v3.TextGenerationService",
        ],
        STATUS.SERVING,
    )
