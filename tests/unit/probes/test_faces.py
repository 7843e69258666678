"""Every face says what the snapshot says: texts as Kubernetes writes them, statuses by the table, over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.probes import exec_probe
from deepseek_tgi.probes.grpc_health import Directory, HealthService
from deepseek_tgi.probes.http_face import MAX_CONNECTIONS, ProbePort, asker_of
from deepseek_tgi.probes.kubernetes import Answer, answer
from deepseek_tgi.probes.owner import Facts, Owner, Snapshot
from deepseek_tgi.probes.report import report_of
from deepseek_tgi.probes.state import Event, State

READY_WAY = (Event.LOAD, Event.LOADED, Event.WARMED)


def snapshot(state: State, started: bool = True, facts: Facts | None = None) -> Snapshot:
    return Snapshot(state, 7, 0.0, started, facts or Facts())


def owner_of(*events: Event) -> Owner:
    owner = Owner()
    for event in events:
        assert owner.apply(event)
    return owner


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("state", State)
def test_the_checks_of_a_face_come_to_what_the_table_says(state: State, started: bool) -> None:
    report = report_of(state, started)
    statuses = {face: answer(face, "", snapshot(state, started)) for face in ("/livez", "/readyz", "/startupz")}
    assert {face: found.status == 200 for face, found in statuses.items() if found is not None} == {
        "/livez": report.live,
        # A process that was never ready cannot be in this state; the table has a row for it all the same.
        "/readyz": report.ready and started,
        "/startupz": report.started,
    }


def test_texts_are_those_of_kubernetes() -> None:
    # The form of kube-apiserver's /readyz (Kubernetes' documentation, "Kubernetes API health endpoints").
    good = snapshot(State.READY)
    assert [answer(face, "", good) for face in ("/livez", "/readyz", "/startupz")] == [Answer(200, "ok")] * 3
    verbose = answer("/readyz", "verbose", good)
    assert verbose is not None
    assert verbose.text == "[+]ping ok\n[+]engine ok\n[+]model ok\n[+]shutdown ok\nreadyz check passed\n"
    excluded = answer("/readyz", "verbose&exclude=engine&exclude=nothing", good)
    assert excluded is not None
    assert excluded.text == (
        "[+]ping ok\n[+]engine excluded: ok\n[+]model ok\n[+]shutdown ok\n"
        'warn: some health checks cannot be excluded: no matches for "nothing"\nreadyz check passed\n'
    )


def test_a_failure_names_its_check_and_says_why_only_where_it_may() -> None:
    sick = snapshot(State.DEGRADED, facts=Facts(reason="a step failed: boom"))
    told, kept = answer("/readyz", "", sick), answer("/readyz", "", sick, tells_reasons=False)
    assert told is not None
    assert kept is not None
    assert (told.status, told.text.splitlines()[1]) == (503, "[-]engine failed: degraded: a step failed: boom")
    assert kept.text == "[+]ping ok\n[-]engine failed: degraded\n[+]model ok\n[+]shutdown ok\nreadyz check failed\n"
    loading = answer("/startupz", "", snapshot(State.LOADING, False, Facts(stage="reading", percent=41.6)))
    assert loading is not None
    assert (loading.status, loading.text.splitlines()[1]) == (503, "[-]model failed: loading, reading 42 %")


def test_a_check_may_be_left_out_or_asked_alone() -> None:
    sick = snapshot(State.DEGRADED)
    assert [
        None if found is None else found.status
        for found in (
            answer("/readyz", "exclude=engine", sick),
            answer("/readyz/engine", "", sick),
            answer("/readyz/model", "", sick),
            answer("/readyz/nothing", "", sick),
            answer("/readyz/", "", sick),
            answer("/other", "", sick),
        )
    ] == [200, 503, 200, None, None, None]


# --- the port of its own ----------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[tuple[Owner, ProbePort]]:
    owner = owner_of(*READY_WAY)
    port = ProbePort(asker_of(owner), "127.0.0.1", 0)
    yield owner, port
    port.stop()


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        found = connection.getresponse()
        return found.status, found.read().decode()
    finally:
        connection.close()


def test_the_port_follows_the_owner(served: tuple[Owner, ProbePort]) -> None:
    owner, port = served
    assert [get(port.port, path) for path in ("/livez", "/readyz", "/startupz")] == [(200, "ok")] * 3
    owner.apply(Event.DEGRADE, reason="lost")
    assert [get(port.port, path)[0] for path in ("/livez", "/readyz", "/startupz")] == [200, 503, 200]
    owner.apply(Event.FAIL)
    assert get(port.port, "/livez")[0] == 503
    assert get(port.port, "/other")[0] == 404
    assert get(port.port, "/livez", "POST")[0] == 405
    assert get(port.port, "/livez", "HEAD") == (503, "")


def test_a_connection_is_used_again(served: tuple[Owner, ProbePort]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served[1].port, timeout=5)
    for _ in range(3):
        connection.request("GET", "/readyz")
        assert connection.getresponse().read() == b"ok"
    connection.close()


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 20000, b"", b"\x16\x03\x01\x00"]
)
def test_what_is_no_request_harms_nobody(served: tuple[Owner, ProbePort], sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served[1].port), 5) as rude:
        rude.sendall(sent)
        rude.shutdown(socket.SHUT_WR)
        assert rude.recv(100)[:12] in (b"", b"HTTP/1.1 400")
    assert get(served[1].port, "/livez") == (200, "ok")


def test_it_answers_while_the_main_thread_holds_still(served: tuple[Owner, ProbePort]) -> None:
    slowest: list[float] = []

    def probe() -> None:
        for _ in range(20):
            started = time.perf_counter()
            assert get(served[1].port, "/readyz")[0] == 200
            slowest.append(time.perf_counter() - started)

    thread = threading.Thread(target=probe)
    thread.start()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:  # holds the interpreter as long as it is let
        pass
    thread.join()
    assert len(slowest) == 20


def test_many_silent_connections_do_not_shut_others_out(served: tuple[Owner, ProbePort]) -> None:
    """More than it keeps: the oldest must make room, and not the prober that comes last."""
    silent = [socket.create_connection(("127.0.0.1", served[1].port), 5) for _ in range(MAX_CONNECTIONS + 20)]
    for _ in range(3):
        assert get(served[1].port, "/livez") == (200, "ok")
    assert silent[0].recv(1) == b"", "the oldest is not the one that was closed"
    for connection in silent:
        connection.close()


def test_a_taken_port_is_told(served: tuple[Owner, ProbePort]) -> None:
    with pytest.raises(OSError, match="in use"):
        ProbePort(asker_of(served[0]), "127.0.0.1", served[1].port)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_asks_and_tells_by_its_exit_code(
    served: tuple[Owner, ProbePort], capsys: pytest.CaptureFixture[str]
) -> None:
    owner, port = served
    environ = {"DEEPSEEK_TGI_PROBE_PORT": str(port.port), "PORT": "1"}
    assert exec_probe.run(["ready"], environ) == 0
    assert capsys.readouterr().out == "ok\n"
    assert exec_probe.run(["live", "--verbose"], environ) == 0
    assert capsys.readouterr().out.endswith("livez check passed\n")
    owner.apply(Event.DEGRADE, reason="the device is gone")
    assert exec_probe.run(["ready", "--port", str(port.port)], {}) == 1
    assert "the device is gone" in capsys.readouterr().out


def test_no_answer_in_time_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        code = exec_probe.run(["live", f"--port={silent.getsockname()[1]}", "--timeout", "0.2"], {})
    assert code == 1
    assert time.monotonic() - started < 2
    assert "no answer from 127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "got nothing, expected one of live, ready, startup"),
        (["alive"], "got alive"),
        (["live", "ready"], "got live ready"),
        (["live", "--port", "0"], "port: got '0'"),
        (["live", "--port", "x"], "port: got 'x'"),
        (["live", "--port"], "--port needs a value"),
        (["live", "--timeout", "nan"], "--timeout: got 'nan'"),
        (["live", "--nope"], "unknown option --nope"),
    ],
)
def test_wrong_options_are_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        exec_probe.run(argv, {})


def test_the_command_starts_within_a_tenth_of_a_second(served: tuple[Owner, ProbePort]) -> None:
    """CPU time of the whole process, the best of five: a busy machine must not decide."""
    code = (
        "import resource, sys; from deepseek_tgi.cli import main; code = main(sys.argv[1:]); "
        "u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime); "
        "print(sorted({'torch', 'grpc', 'http.client', 'asyncio', 'uvicorn'} & sys.modules.keys())); sys.exit(code)"
    )
    taken = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", code, "probe", "ready", "--port", str(served[1].port)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        said, seconds, heavy = done.stdout.splitlines()
        assert (said, heavy) == ("ok", "[]")
        taken.append(float(seconds))
    assert min(taken) < 0.1


# --- gRPC -------------------------------------------------------------------------------------------------------------

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class GrpcBench:
    """The health service on a socket, and grpc's own stub for it."""

    def __init__(self, owner: Owner, *names: str) -> None:
        self.directory = Directory(owner, *names)

    async def __aenter__(self) -> GrpcBench:
        self.server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(self.directory), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = health_pb2_grpc.HealthStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(None)

    async def check(self, name: str = "") -> int:
        answer = await self.stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        status: int = answer.status
        return status

    def watch(self, name: str = "") -> grpc.aio.UnaryStreamCall:
        return self.stub.Watch(health_pb2.HealthCheckRequest(service=name))


async def next_status(call: grpc.aio.UnaryStreamCall) -> int:
    answer = await asyncio.wait_for(call.read(), 5)
    status: int = answer.status
    return status


async def test_check_is_the_table_and_unknown_names_are_not_found() -> None:
    owner = owner_of()
    async with GrpcBench(owner, "generate.v3.TextGenerationService") as bench:
        seen = []
        for event in (*READY_WAY, Event.DEGRADE, Event.RECOVER, Event.STOP, Event.STOPPED):
            owner.apply(event)
            both = {await bench.check(), await bench.check("generate.v3.TextGenerationService")}
            seen.append(both)
        assert seen == [
            {s} for s in (NOT_SERVING, NOT_SERVING, SERVING, NOT_SERVING, SERVING, NOT_SERVING, NOT_SERVING)
        ]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.check("nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_list_tells_every_name() -> None:
    async with GrpcBench(owner_of(*READY_WAY), "a") as bench:
        bench.directory.put("b", owner_of(Event.LOAD))
        listed = await bench.stub.List(health_pb2.HealthListRequest(), timeout=5)
    assert {name: each.status for name, each in listed.statuses.items()} == {
        "": SERVING,
        "a": SERVING,
        "b": NOT_SERVING,
    }


async def test_watch_tells_every_change_even_a_short_one() -> None:
    owner = owner_of()
    async with GrpcBench(owner) as bench:
        call = bench.watch()
        assert await next_status(call) == NOT_SERVING
        for event in (*READY_WAY, Event.DEGRADE, Event.RECOVER, Event.STOP):
            owner.apply(event)
        assert [await next_status(call) for _ in range(4)] == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
        bench.directory.close()
        assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF


async def test_watch_follows_a_name_that_comes_changes_hands_and_goes() -> None:
    async with GrpcBench(owner_of(*READY_WAY)) as bench:
        call = bench.watch("model")
        assert await next_status(call) == UNKNOWN
        loading = owner_of(Event.LOAD)
        bench.directory.put("model", loading)
        assert await next_status(call) == NOT_SERVING
        for event in (Event.LOADED, Event.WARMED):
            loading.apply(event)
        assert await next_status(call) == SERVING
        bench.directory.put("model", owner_of(Event.LOAD))
        assert await next_status(call) == NOT_SERVING
        bench.directory.remove("model")
        assert await next_status(call) == UNKNOWN
