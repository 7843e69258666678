"""A server started and stopped again and again under probes that never pause: no answer may be wrong at any moment.

Right means: nothing but "not there" before the process listens; live until it has stopped; started and ready only once
a request would be answered, and not ready within a second of the signal to stop; the same over `grpc.health.v1`.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import tiny_checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc
from launched_server import LaunchedServer, free_port
from probe_watch import ProbeWatch

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NOT_READY_WITHIN_S = 1.0


class HealthWatch:
    """The statuses that `Watch` of the whole server sends, in order, until the server ends it."""

    def __init__(self, port: int) -> None:
        self.statuses: list[int] = []
        self.not_serving_at = 0.0
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                self.statuses.append(answer.status)
                if answer.status == NOT_SERVING:
                    self.not_serving_at = time.monotonic()
        except grpc.RpcError:
            return

    def close(self) -> None:
        self._thread.join(10)
        self._channel.close()


def cycle(model: Path, folder: Path) -> tuple[float, float]:
    """One life of a server; seconds from the signal until the HTTP and the gRPC face say that it is not ready."""
    folder.mkdir()
    probe_port, grpc_port = free_port(), free_port()
    extra = ["--probe-port", str(probe_port), "--grpc-port", str(grpc_port), "--max-total-tokens", "128"]
    extra += ["--max-input-tokens", "100", "--kv-memory", "1MiB", "--max-batch-prefill-tokens", "128"]
    with ProbeWatch(probe_port) as watch:
        server = LaunchedServer.start(model, folder, extra)
        try:
            watch.wait("readyz", 200, 20)
            answer = server.post("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 2}})
            assert answer.status_code == 200, f"ready, and yet {answer.status_code} {answer.text}"
            health = HealthWatch(grpc_port)
            while not health.statuses:
                time.sleep(0.005)
            told_at = time.monotonic()
            server.process.terminate()
            fell = watch.wait_for_no("readyz", NOT_READY_WITHIN_S + 1)
            assert server.wait(30) == 0, server.words()
            watch.wait("livez", 0, 5)
            health.close()
        finally:
            server.stop()
    # A process that has stopped is not live in the moment before it is gone; nobody restarts what was asked to stop.
    assert all(change.at > told_at for change in watch.changes if (change.face, change.status) == ("livez", 503))
    for face, allowed in (
        ("livez", [0, 200, 503, 0]),
        ("startupz", [0, 503, 200, 0]),
        ("readyz", [0, 503, 200, 503, 0]),
    ):
        seen = iter(allowed)
        # In order; what lies between two looks may be missed, and nothing else may be seen.
        assert all(status in seen for status in watch.seen(face)), f"{face}: {watch.seen(face)}, {watch.changes}"
        assert 200 in watch.seen(face)
    assert health.statuses == [SERVING, NOT_SERVING]
    return fell.at - told_at, health.not_serving_at - told_at


def test_probes_are_right_through_starts_and_stops(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama", "awq-gemm").path
    for number in range(2):
        took = cycle(model, tmp_path / str(number))
        assert max(took) < NOT_READY_WITHIN_S


@pytest.mark.benchmark
@pytest.mark.timeout(3600)
def test_probes_are_right_through_a_hundred_starts_and_stops(tmp_path: Path) -> None:
    """`pytest tests/e2e/test_probe_cycles.py -n 0 -m benchmark`: what was measured goes to the results folder."""
    model = tiny_checkpoint(tmp_path / "model", "llama", "awq-gemm").path
    http, grpc_face = zip(*(cycle(model, tmp_path / str(number)) for number in range(100)), strict=True)
    assert max(*http, *grpc_face) < NOT_READY_WITHIN_S
    folder = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
    found = {
        "command": "python -m pytest tests/e2e/test_probe_cycles.py -n 0 -m benchmark",
        "cycles": len(http),
        "wrong_answers": 0,
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        "seconds_from_sigterm_to_not_ready": {
            "http": {"median": statistics.median(http), "max": max(http)},
            "grpc.health.v1": {"median": statistics.median(grpc_face), "max": max(grpc_face)},
        },
    }
    path = folder / f"{time.strftime('%Y-%m-%d', time.gmtime())}-probe-cycles.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
