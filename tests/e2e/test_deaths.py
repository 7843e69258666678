"""Ends of every kind: a killed shard, router or launcher, Ctrl-C, SIGTERM amid a stream. No hang, no orphan."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from launched_server import LaunchedServer, alive, await_true

STREAM_TOKENS = 400


@pytest.fixture
def doomed(tmp_path: Path, tiny_model_dir: Path) -> Iterator[LaunchedServer]:
    """A server of the test's own."""
    running = LaunchedServer.start(tiny_model_dir, tmp_path, ["--max-total-tokens", "512", "--max-input-tokens", "64"])
    yield running
    running.stop()


def assert_all_gone(server: LaunchedServer, below: dict[int, str]) -> None:
    """No process, no listener and no socket file is left."""
    await_true(lambda: not any(alive(pid) for pid in below), f"no orphan of {below}")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health", timeout=5)
    assert not Path(f"{server.uds_stem}-0").exists()


@pytest.mark.parametrize("victim", ["shard", "router"])
def test_killing_a_part_ends_the_whole_with_an_error(doomed: LaunchedServer, victim: str) -> None:
    below = doomed.children()
    with doomed.streaming("a stream is open", STREAM_TOKENS) as events:
        next(events)
        os.kill(doomed.shard_pid if victim == "shard" else doomed.router_pid, signal.SIGKILL)
        client = threading.Thread(target=drain, args=(events,))
        client.start()
        client.join(30)
        assert not client.is_alive(), "the client of the dead server hangs"
    assert doomed.wait(30) not in (0, None)
    words = doomed.words().lower()
    assert victim in words or ("webserver" in words and victim == "router")
    assert "Traceback" not in doomed.words()
    await_true(lambda: not any(alive(pid) for pid in below), f"no orphan of {below}")


def drain(events: Iterator[object]) -> list[object]:
    """What still comes; a broken connection is an end too."""
    read: list[object] = []
    try:
        read.extend(events)
    except (httpx.HTTPError, ValueError):
        return read
    return read


def interrupt_group(server: LaunchedServer) -> None:
    os.killpg(server.process.pid, signal.SIGINT)


def interrupt_launcher(server: LaunchedServer) -> None:
    server.process.send_signal(signal.SIGINT)


def hang_up(server: LaunchedServer) -> None:
    server.process.send_signal(signal.SIGHUP)


@pytest.mark.parametrize("stop", [interrupt_group, interrupt_launcher, hang_up], ids=lambda f: f.__name__)
def test_a_signal_ends_everything_quietly(doomed: LaunchedServer, stop: Callable[[LaunchedServer], None]) -> None:
    below = doomed.children()
    stop(doomed)
    assert doomed.wait(20) == 0
    assert_all_gone(doomed, below)
    assert "Traceback" not in doomed.words()


def test_sigterm_amid_a_stream_lets_it_finish(doomed: LaunchedServer) -> None:
    below = doomed.children()
    with doomed.streaming("the last words of a server", STREAM_TOKENS) as events:
        first = next(events)
        doomed.process.terminate()
        rest = list(events)
    assert first["index"] == 1
    assert rest[-1]["generated_text"] is not None
    assert rest[-1]["index"] == STREAM_TOKENS
    assert doomed.wait(30) == 0
    assert_all_gone(doomed, below)


def test_killing_the_launcher_leaves_no_orphan(doomed: LaunchedServer) -> None:
    below = doomed.children()
    assert len(below) >= 2
    doomed.process.kill()
    await_true(lambda: not any(alive(pid) for pid in below), f"no orphan of {below}", 15)
