"""Clients that go away: their requests leave the batch, their blocks and permits come back, neighbours go on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import socket

import httpx
from launched_server import LaunchedServer, await_true

FULL = {"max_new_tokens": 32}
LONG_PROMPT = "x" * 479
"""480 tokens with BOS: the longest the server takes."""
PARALLEL_FULL = 3
"""Full-length requests that the server's small cache holds at once."""
PERMITS = 8


def assert_nothing_leaked(server: LaunchedServer) -> None:
    """The server is idle, the cache still holds its fill of full-length requests, and every permit is free."""
    await_true(server.idle, "queue and batch are empty")
    with concurrent.futures.ThreadPoolExecutor(PERMITS) as pool:
        full = list(pool.map(lambda _: server.post("/generate", {"inputs": LONG_PROMPT, "parameters": FULL}), range(3)))
        small = list(pool.map(lambda _: server.post("/generate", {"inputs": "x", "parameters": FULL}), range(PERMITS)))
    assert [r.status_code for r in full] == [200] * PARALLEL_FULL
    assert [r.status_code for r in small] == [200] * PERMITS


def test_a_closed_stream_frees_its_place_long_before_its_end(server: LaunchedServer) -> None:
    wanted = server.generate("an undisturbed neighbour", max_new_tokens=60)["generated_text"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(server.generate, "an undisturbed neighbour", max_new_tokens=60)
        for number in range(12):
            with server.streaming(f"stream {number} that is given up", 440) as events:
                assert len(list(itertools.islice(events, 3))) == 3
        assert neighbour.result()["generated_text"] == wanted
    assert_nothing_leaked(server)


def test_a_closed_plain_request_stops_too(server: LaunchedServer) -> None:
    before = server.metric("tgi_request_success")
    # More than the cache holds at once: the later ones wait while the earlier ones run.
    connections = [sent(server, 460, "/generate") for _ in range(PERMITS)]
    await_true(lambda: server.metric("tgi_batch_current_size") > 0, "they run")
    for connection in connections:
        connection.close()
    await_true(server.idle, "given-up requests left the batch")
    assert server.metric("tgi_request_success") - before < PERMITS, "they all ran to their end: nothing was stopped"
    assert_nothing_leaked(server)


def test_a_hundred_ends_of_every_kind_leak_no_permit(server: LaunchedServer) -> None:
    def one(number: int) -> None:
        kind = number % 5
        if kind == 0:
            assert server.post("/generate", {"inputs": "fine", "parameters": {"max_new_tokens": 2}}).status_code == 200
        elif kind == 1:
            assert server.post("/generate", {"inputs": "", "parameters": {"max_new_tokens": 2}}).status_code == 422
        elif kind == 2:
            with server.streaming("left midway", 300) as events:
                next(events)
        elif kind == 3:
            left_at_once(server)
        else:
            too_long = {"inputs": "y", "parameters": {"max_new_tokens": 2, "truncate": 10**6}}
            assert server.post("/generate_stream", too_long).status_code == 200

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(100)))
    assert_nothing_leaked(server)


def left_at_once(server: LaunchedServer) -> None:
    """Send a whole request and go away before any answer."""
    sent(server, 300).close()


def sent(server: LaunchedServer, max_new_tokens: int, path: str = "/generate_stream") -> socket.socket:
    """A connection over which a whole request was sent."""
    body = json.dumps({"inputs": "gone", "parameters": {"max_new_tokens": max_new_tokens}})
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    return connection


def test_one_request_too_many_is_told_so_at_once(server: LaunchedServer) -> None:
    # The holders may end before the last request comes, on a machine that is busy with other things; not five times.
    refused = next((r for r in (one_too_many(server) for _ in range(5)) if r.status_code != 200), None)
    assert refused is not None, "more requests than permits were all served"
    assert refused.status_code == 429
    assert refused.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
    assert_nothing_leaked(server)


def one_too_many(server: LaunchedServer) -> httpx.Response:
    """Open a stream a permit, then ask once more."""
    with contextlib.ExitStack() as holders:
        opened = [holders.enter_context(sent(server, 440)) for _ in range(PERMITS)]
        for connection in opened:
            assert connection.recv(12) == b"HTTP/1.1 200"
        return server.post("/generate", {"inputs": "one more", "parameters": {"max_new_tokens": 1}})
