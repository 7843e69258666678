"""A thousand requests that are wrong in every way a seeded generator thinks of: all answered, none remembered."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched_server import LaunchedServer, anonymous_bytes, await_true

NUM_REQUESTS = 1000
MEMORY_SLACK_BYTES = 32 * 2**20
"""Allocator noise; bodies alone, if kept, would be more."""

PATHS = ("/generate", "/generate_stream", "/v1/chat/completions", "/v1/completions", "/tokenize", "/", "/invocations")
VALID: dict[str, dict[str, Any]] = {
    "native": {"inputs": "hi", "parameters": {"max_new_tokens": 1, "temperature": 0.5, "seed": 1, "stop": ["x"]}},
    "chat": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stop": ["x"], "seed": 1},
    "completion": {"prompt": "hi", "max_tokens": 1, "temperature": 0.5, "seed": 1},
}
WRONG: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**30, -(2**63), 2**64, 1e400, "", "text", "\ud800", "\x00", [], {}, [[]], [None]),
    *({"a": 1}, "9" * 500, float("nan"), ["x"] * 50, {"type": "regex", "value": "("}, {"type": "json", "value": 1}),
]
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff",
    b"GET\r\n\r\n",
    b"\r\n\r\n\r\n",
    b"POST /generate HTTP/9.9\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
    b"GET /\x00\xff HTTP/1.1\r\nHost: x\r\n\r\n",
)


class Faults:
    """Makes broken requests; `next` gives raw bytes and whether a 4xx is the only right answer."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._makers: list[Callable[[], tuple[bytes, bool]]] = [
            *(self.wrong_value, self.wrong_value, self.wrong_value, self.bad_json, self.bad_json, self.bad_utf8),
            *(self.deep, self.twice, self.truncated_body, self.bad_header, self.not_an_object, self.garbage),
        ]

    def next(self) -> tuple[bytes, bool]:
        return self._rng.choice(self._makers)()

    def _base(self) -> tuple[str, dict[str, Any]]:
        kind = self._rng.choice(list(VALID))
        body: dict[str, Any] = json.loads(json.dumps(VALID[kind]))
        path = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}.get(kind)
        return path or self._rng.choice(["/generate", "/generate_stream", "/"]), body

    def http(self, path: str, body: bytes, length: int | None = None, headers: str = "") -> bytes:
        kind = headers or "Content-Type: application/json\r\n"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{kind}Content-Length: {len(body) if length is None else length}\r\n"
        return (head + "Connection: close\r\n\r\n").encode() + body

    def wrong_value(self) -> tuple[bytes, bool]:
        """One value of a good request replaced, wherever it stands."""
        path, body = self._base()
        where = body
        while True:
            key = self._rng.choice(list(where))
            inner = where[key][0] if isinstance(where[key], list) and where[key] else where[key]
            if isinstance(inner, dict) and self._rng.random() < 0.8:
                where = inner
                continue
            break
        where[key] = self._rng.choice(WRONG)
        if key in ("max_new_tokens", "max_tokens") and where[key] in (None, 10**30, 2**64):
            where[key] = "many"  # a good request for very much is not what is tested here
        if key == "parameters" and not where[key]:
            where[key] = 7
        return self.http(path, json.dumps(body, ensure_ascii=self._rng.random() < 0.9).encode("utf-8", "ignore")), False

    def bad_json(self) -> tuple[bytes, bool]:
        path, body = self._base()
        text = bytearray(json.dumps(body).encode())
        how = self._rng.randrange(4)
        if how == 0:
            del text[self._rng.randrange(1, len(text)) :]
        elif how == 1:
            text[0] = self._rng.choice(b"[(<x,")
        elif how == 2:
            text += self._rng.choice([b"}", b",", b"[", b" x", b"\x00"])
        else:
            text[:1] = b"{'"
        return self.http(path, bytes(text)), True

    def bad_utf8(self) -> tuple[bytes, bool]:
        path, body = self._base()
        text = json.dumps(body).encode().replace(b"hi", self._rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5"]))
        return self.http(path, text), True

    def deep(self) -> tuple[bytes, bool]:
        depth = self._rng.choice([200, 5000, 100_000])
        opener, closer = self._rng.choice([("[", "]"), ('{"a":', "}")])
        nested = opener * depth + "1" + closer * depth
        body = self._rng.choice([nested, f'{{"inputs":{nested}}}', f'{{"messages":{nested}}}'])
        return self.http(self._rng.choice(PATHS), body.encode()), True

    def twice(self) -> tuple[bytes, bool]:
        """A key given twice, or beside its alias."""
        path, text = self._rng.choice(
            [
                ("/generate", b'{"inputs":"hi","inputs":"ho","parameters":{"max_new_tokens":1}}'),
                ("/generate", b'{"inputs":"hi","parameters":{"max_new_tokens":1,"max_new_tokens":2}}'),
                ("/v1/completions", b'{"prompt":"a","prompt":"b","max_tokens":1}'),
                (
                    "/v1/chat/completions",
                    b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"max_completion_tokens":1}',
                ),
            ]
        )
        return self.http(path, text), True

    def truncated_body(self) -> tuple[bytes, bool]:
        path, body = self._base()
        text = json.dumps(body).encode()
        return self.http(path, text[: len(text) // 2], len(text)), False

    def bad_header(self) -> tuple[bytes, bool]:
        path, body = self._base()
        kind = self._rng.choice(["text/plain", "application/xml", "application", "multipart/form-data; boundary=x", ""])
        return self.http(path, json.dumps(body).encode(), headers=f"Content-Type: {kind}\r\n"), True

    def not_an_object(self) -> tuple[bytes, bool]:
        body = self._rng.choice([b"", b"null", b"1", b'"x"', b"[]", b"{}", b"true", b"[{}]"])
        return self.http(self._rng.choice(PATHS), body), True

    def garbage(self) -> tuple[bytes, bool]:
        if self._rng.random() < 0.5:
            return self._rng.choice(GARBAGE), False
        return self._rng.randbytes(self._rng.randrange(1, 3000)), False


def not_cut(data: bytes) -> bool:
    """True if as much body follows as the head promises."""
    head, _, body = data.partition(b"\r\n\r\n")
    promised = re.search(rb"Content-Length: (\d+)\r\nConnection", head)
    return promised is not None and len(body) == int(promised[1])


def exchange(port: int, data: bytes, complete: bool = True) -> bytes:
    """Send everything, and say so if it is not a complete request; read the whole answer. Silence is a failure."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            connection.sendall(data)
            if not complete:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                received += piece
        except TimeoutError:
            raise AssertionError(f"no answer to {data[:300]!r}") from None
        except OSError:  # the server closed first
            return received
    return received


def test_a_thousand_malformed_requests_are_each_answered_and_none_is_kept(server: LaunchedServer) -> None:
    before = server.generate("still the same", max_new_tokens=6)["generated_text"]
    faults = Faults(seed=9)
    pids = (server.router_pid, server.shard_pid)
    early: list[int] = []
    seen: dict[str, int] = {}
    for number in range(NUM_REQUESTS):
        data, refused = faults.next()
        answer = exchange(server.port, data, complete=data.startswith(b"POST") and not_cut(data))
        status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.") else "none"
        seen[status] = seen.get(status, 0) + 1
        assert not status.startswith("5"), f"request {number} {data[:300]!r} got {answer[:500]!r}"
        assert not refused or status.startswith("4"), f"request {number} {data[:300]!r} got {answer[:500]!r}"
        if number == NUM_REQUESTS // 4:
            early = [anonymous_bytes(pid) for pid in pids]
    growth = [anonymous_bytes(pid) - start for pid, start in zip(pids, early, strict=True)]
    assert max(growth) < MEMORY_SLACK_BYTES, growth
    assert {"200", "400", "415", "422"} <= set(seen), seen
    assert seen["none"] < NUM_REQUESTS / 5, seen
    assert server.generate("still the same", max_new_tokens=6)["generated_text"] == before
    await_true(server.idle, "queue and batch are empty")
    assert "Traceback" not in server.words()


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_on_the_unix_socket_harms_nobody(server: LaunchedServer, data: bytes) -> None:
    path = Path(f"{server.uds_stem}-0")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except ConnectionError:
            pass
    assert server.generate("unharmed", max_new_tokens=2)["details"]["generated_tokens"] == 2


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: LaunchedServer) -> None:
    body = b'{"inputs":"' + b"x" * 2_100_000 + b'"}'
    answer = exchange(server.port, Faults(0).http("/generate", body))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"length limit exceeded" in answer


def test_slow_and_silent_connections_do_not_block_others(server: LaunchedServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(100)]
    try:
        for number, connection in enumerate(idle):
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n"[: number % 30])
        assert server.generate("others wait", max_new_tokens=2)["details"]["generated_tokens"] == 2
    finally:
        for connection in idle:
            connection.close()
