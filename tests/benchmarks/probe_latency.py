"""How long every probe takes while one long prompt fills the machine, and what an answer costs by itself.

Run: `python -m tests.benchmarks.probe_latency [--tokens 8000] [--out FILE]`. The real small model reads one prompt in
steps of that many tokens with all threads; each face is asked ten times a second meanwhile, the command more rarely.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deepseek_tgi.probes.kubernetes import answer
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event
from tests.benchmarks.measure import circumstances
from tests.launched_server import LaunchedServer, free_port

PERIOD_S = 0.1
COMMAND = "deepseek-tgi probe ready"
COMMAND_PERIOD_S = 2.0
"""A command is a process: ten a second would be a load of their own."""
TARGET_P99_S = 0.05
TARGET_COST_S = 0.001


def get(port: int, path: str) -> Callable[[], None]:
    """A probe over HTTP, a new connection each time, as a kubelet makes."""

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        found = connection.getresponse()
        found.read()
        connection.close()
        assert found.status == 200, (path, found.status)

    return ask


def check(path: str) -> Callable[[], None]:
    """A probe over gRPC, on the shard's socket."""
    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"unix:{path}"))

    def ask() -> None:
        found = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert found.status == health_pb2.HealthCheckResponse.SERVING

    return ask


def command(port: int) -> Callable[[], None]:
    """The exec probe, process and all."""

    def ask() -> None:
        subprocess.run(["deepseek-tgi", "probe", "ready", "--port", str(port)], check=True, capture_output=True)

    return ask


def asked(ask: Callable[[], None], period_s: float, until: threading.Event, samples: list[float]) -> None:
    """Ask again and again; seconds of each answer."""
    while not until.wait(period_s):
        started = time.perf_counter()
        ask()
        samples.append(time.perf_counter() - started)


def cost_s() -> float:
    """Seconds that one verbose answer takes to make, the median of many."""
    owner = Owner()
    for event in (Event.LOAD, Event.LOADED, Event.WARMED):
        owner.apply(event)
    samples = []
    for _ in range(2000):
        started = time.perf_counter()
        answer("/readyz", "verbose", owner.current)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that `share` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(tokens: int, threads: int) -> dict[str, Any]:
    """Start a server, let it read one prompt, and probe meanwhile."""
    probe_port = free_port()
    limits = ["--max-input-tokens", str(tokens), "--max-total-tokens", str(tokens + 16)]
    limits += ["--max-batch-prefill-tokens", str(tokens)]
    with tempfile.TemporaryDirectory() as folder:
        options = [*limits, "--probe-port", str(probe_port), "--num-threads", str(threads)]
        server = LaunchedServer.start("smollm2", Path(folder), options)
        try:
            return probed(server, probe_port, tokens)
        finally:
            server.stop()


def probed(server: LaunchedServer, probe_port: int, tokens: int) -> dict[str, Any]:
    """The figures of one prompt."""
    faces = {
        "GET /readyz, probe port": get(probe_port, "/readyz"),
        "GET /livez, HTTP port": get(server.port, "/livez"),
        "GET /health, HTTP port (asks the shard)": get(server.port, "/health"),
        "grpc.health.v1 Check, shard": check(f"{server.uds_stem}-0"),
        COMMAND: command(probe_port),
    }
    samples: dict[str, list[float]] = {name: [] for name in faces}
    over = threading.Event()
    threads = [
        threading.Thread(
            target=asked, args=(ask, COMMAND_PERIOD_S if name == COMMAND else PERIOD_S, over, samples[name])
        )
        for name, ask in faces.items()
    ]
    for thread in threads:
        thread.start()
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    text = " the" * (tokens - 50)
    body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": 1}})
    connection.request("POST", "/generate", body, {"content-type": "application/json"})
    found = connection.getresponse()
    assert found.status == 200, found.read()
    seconds = time.perf_counter() - started
    over.set()
    for thread in threads:
        thread.join()
    rows = {
        name: {
            "asked": len(values),
            "p50_ms": round(1e3 * statistics.median(values), 2),
            "p99_ms": round(1e3 * percentile(values, 0.99), 2),
            "max_ms": round(1e3 * max(values), 2),
        }
        for name, values in samples.items()
    }
    return {"prompt_tokens": tokens - 50, "prefill_s": round(seconds, 1), "cores": os.cpu_count(), "faces": rows}


def main() -> None:
    """Measure and print; with `--out`, write too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=0, help="of the shard; 0 for all cores")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report: dict[str, Any] = {
        **circumstances(),
        "command": shlex.join(["python", "-m", "tests.benchmarks.probe_latency", *sys.argv[1:]]),
        **measure(given.tokens, given.threads),
        "shard_threads": given.threads or os.cpu_count(),
        "cost_of_an_answer_us": round(1e6 * cost_s(), 1),
        "load_average_after": os.getloadavg()[0],
    }
    print(json.dumps(report, indent=2))
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
