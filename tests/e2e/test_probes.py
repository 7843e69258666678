"""The probes of a whole server, launcher, router and shard: start, faults, long work, and the end, seen from outside.

The shard has a stub engine: what a prompt says happens, and nothing needs a model's weights.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from builders import tiny_checkpoint
from stub_server import ADMIN_TOKEN, StubServer

STALL_LIMIT_S = 3.0
SLACK_S = 1.5
"""For a busy machine, beyond the documented bounds."""
SOON_S = 1.0

Launch = Callable[..., StubServer]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[StubServer] = []

    def make(*argv: str, **environ: str) -> StubServer:
        started.append(StubServer.launch(tmp_path, "--stall-limit", str(STALL_LIMIT_S), *argv, **environ))
        return started[-1]

    yield make
    for server in started:
        server.__exit__()


@pytest.fixture
def server(launch: Launch) -> StubServer:
    """One that is ready."""
    found = launch()
    found.wait_ready()
    return found


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("full", "No space left on device: '/cache/kernels'"),
        ("memory", "MemoryError: no more"),
        ("die", "loading broke off: SystemExit: 3"),
    ],
)
def test_a_load_that_breaks_halfway_is_told_and_the_server_serves_on(launch: Launch, how: str, reason: str) -> None:
    server = launch(STUB_NEXT_LOAD="next-load")
    server.wait_ready()
    (server.folder / "next-load").write_text(how)
    other = tiny_checkpoint(server.folder / "other", "llama").path
    status, error = server.load(str(other))
    assert (status, reason in error) == (409, True), error
    shown = server.client.get("/admin/models", headers={"authorization": f"Bearer {ADMIN_TOKEN}"}).json()
    assert shown["serving"]["model_id"] == str(server.folder / "model")
    assert shown["change"] is None
    assert reason in shown["history"][-1]["error"]
    answer = server.client.post("/generate", json={"inputs": "x", "parameters": {"max_new_tokens": 1}})
    assert answer.status_code == 200
    assert (server.watch.seen("readyz"), server.watch.seen("livez")) == ([200], [200])
    (server.folder / "next-load").unlink()
    assert server.load(str(other)) == (200, ""), "what broke has left nothing behind"


def test_while_it_loads_it_is_live_and_neither_ready_nor_started(launch: Launch) -> None:
    server = launch(STUB_LOAD_S="4")
    server.watch.wait("livez", 200, 30)
    assert (server.watch.wait("readyz", 503, 5).status, server.watch.wait("startupz", 503, 5).status) == (503, 503)
    deadline = time.monotonic() + 20
    while True:
        try:
            early = server.client.post("/generate", json={"inputs": "x"})
            break
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert (early.status_code, early.json()["error_type"]) == (503, "not_ready")
    assert "loading, waiting for the shards" in early.json()["error"]
    assert [server.status(path) for path in ("/livez", "/readyz", "/startupz", "/health")] == [200, 503, 503, 503]
    server.watch.wait("readyz", 200, 60)
    assert [server.status(path) for path in ("/livez", "/readyz", "/startupz", "/health")] == [200] * 4
    assert server.watch.seen("livez")[-1:] == [200]
    assert 503 not in server.watch.seen("livez")
    assert server.watch.seen("startupz")[-2:] == [503, 200]


def test_a_load_that_fails_is_never_ready(launch: Launch) -> None:
    server = launch(STUB_LOAD_S="2", STUB_FAIL="model.safetensors: truncated")
    server.watch.wait("livez", 200, 30)
    assert server.process.wait(60) == 3
    assert 200 not in server.watch.seen("readyz") + server.watch.seen("startupz")


def test_a_shard_that_is_killed_while_it_loads_is_never_ready(launch: Launch) -> None:
    server = launch(STUB_LOAD_S="60")
    server.watch.wait("livez", 200, 30)
    os.kill(server.child("stub_shard.py serve"), signal.SIGKILL)
    assert server.process.wait(30) == 1
    assert 200 not in server.watch.seen("readyz") + server.watch.seen("startupz")


def test_a_killed_shard_is_not_live_at_once(server: StubServer) -> None:
    killed = time.monotonic()
    os.kill(server.child("stub_shard.py serve"), signal.SIGKILL)
    assert server.watch.wait_for_no("readyz", SOON_S + SLACK_S).at - killed < SOON_S + SLACK_S
    assert server.watch.wait_for_no("livez", SOON_S + SLACK_S).at - killed < SOON_S + SLACK_S
    assert server.process.wait(30) == 1


def test_a_frozen_shard_is_unready_within_a_second_and_not_live_at_the_limit(server: StubServer) -> None:
    """Requests and probes go on arriving meanwhile: neither is a sign of life."""
    frozen = time.monotonic()
    os.kill(server.child("stub_shard.py serve"), signal.SIGSTOP)
    senders = [server.generate("x") for _ in range(3)]
    fell = server.watch.wait("readyz", 503, SOON_S + SLACK_S)
    assert fell.at - frozen < SOON_S + SLACK_S
    assert "shard 0 has stood still" in fell.text
    assert server.watch.status("livez") == 200
    died = server.watch.wait_for_no("livez", STALL_LIMIT_S + SOON_S + SLACK_S)
    assert STALL_LIMIT_S - 0.5 < died.at - frozen < STALL_LIMIT_S + SOON_S + SLACK_S
    for sender in senders:
        sender.join(20)
    assert server.process.wait(60) == 1, "and the launcher ends it all"


def test_a_shard_that_thaws_before_the_limit_is_ready_again(server: StubServer) -> None:
    pid = server.child("stub_shard.py serve")
    os.kill(pid, signal.SIGSTOP)
    server.watch.wait("readyz", 503, SOON_S + SLACK_S)
    asked = time.monotonic()
    assert server.status("/health") == 503
    assert time.monotonic() - asked < SOON_S + SLACK_S, "what is known to be silent is not waited for"
    os.kill(pid, signal.SIGCONT)
    server.watch.wait("readyz", 200, 5)
    assert server.watch.seen("livez") == [200]


def test_a_hung_step_is_unready_within_a_second_and_not_live_at_the_limit(server: StubServer) -> None:
    server.generate("sleep 60")
    started = time.monotonic()
    fell = server.watch.wait("readyz", 503, SOON_S + SLACK_S)
    assert "shard 0 is degraded: the engine thread, in Prefill, has stood still" in fell.text
    died = server.watch.wait_for_no("livez", STALL_LIMIT_S + SOON_S + SLACK_S)
    assert died.at - started < STALL_LIMIT_S + SOON_S + SLACK_S
    assert server.process.wait(60) == 1


def test_a_step_that_raises_is_unready_within_a_second_and_recovers(server: StubServer) -> None:
    server.generate("raise boom")
    assert "a step failed: boom" in server.watch.wait("readyz", 503, SOON_S + SLACK_S).text
    server.watch.wait("readyz", 200, 5)
    assert server.watch.seen("livez") == [200]


def test_long_work_is_no_fault_and_every_probe_answers_quickly(server: StubServer) -> None:
    server.watch.latencies_s.clear()
    sender = server.generate(f"work {2 * STALL_LIMIT_S}")
    slowest = 0.0
    while sender.is_alive():
        started = time.monotonic()
        assert server.status("/health") == 200
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.1)
    assert (server.watch.seen("livez"), server.watch.seen("readyz")) == ([200], [200])
    assert slowest < 0.5
    assert sorted(server.watch.latencies_s)[int(len(server.watch.latencies_s) * 0.99)] < 0.25


def test_the_state_is_a_metric_and_its_changes_are_counted(server: StubServer) -> None:
    server.generate("raise boom")
    server.watch.wait("readyz", 503, SOON_S + SLACK_S)
    server.watch.wait("readyz", 200, 5)
    text = server.client.get("/metrics").text
    assert 'deepseek_tgi_state{state="ready"} 1\n' in text
    assert 'deepseek_tgi_state{state="degraded"} 0\n' in text
    counted = re.search(r'deepseek_tgi_state_transitions{before="ready",after="degraded"} ([0-9]+)\n', text)
    assert counted is not None
    assert int(counted[1]) >= 1


def test_sigterm_is_unready_at_once_takes_requests_for_the_delay_and_ends_well(launch: Launch) -> None:
    server = launch("--shutdown-delay", "3")
    server.watch.wait("readyz", 200, 60)
    running = server.generate("sleep 1")
    time.sleep(0.3)
    server.process.terminate()
    told = time.monotonic()
    assert server.watch.wait("readyz", 503, SOON_S + SLACK_S).at - told < SOON_S + SLACK_S
    late = server.client.post("/generate", json={"inputs": "x", "parameters": {"max_new_tokens": 1}})
    assert (late.status_code, late.json()) == (200, {"generated_text": "ok"}), (
        "endpoints are removed later than we know"
    )
    assert server.watch.status("livez") == 200
    running.join(20)
    assert server.process.wait(30) == 0
    assert 503 not in server.watch.seen("livez")[:-2], "only as the last word, of a process that has stopped"


def test_a_second_signal_ends_it_at_once(server: StubServer) -> None:
    server.generate("sleep 30")
    time.sleep(0.3)
    server.process.terminate()
    time.sleep(0.4)
    assert server.process.poll() is None
    server.process.terminate()
    assert server.process.wait(5) == 128 + signal.SIGTERM
