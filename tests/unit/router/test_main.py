"""The router as a process: exit codes, one clear line for what is wrong, and a clean end under SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_script import Traits
from fake_shard import FakeShard
from tiny_tokenizer import write_tokenizer

from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.main import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    return folder


class Door:
    """A router process in front of `shard`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, shard: FakeShard) -> None:
        self.process = process
        self.shard = shard
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)

    async def up(self) -> None:
        for _ in range(1000):
            assert self.process.returncode is None, await self.process.stderr.read()  # type: ignore[union-attr]
            try:
                await self.client.get("/info")
            except httpx.TransportError:
                await asyncio.sleep(0.02)
            else:
                return
        raise AssertionError("the router does not answer")

    async def ready(self) -> int:
        return (await self.client.get("/ready")).status_code

    async def end(self) -> tuple[int, str]:
        _, err = await asyncio.wait_for(self.process.communicate(), 20)
        return self.process.returncode or 0, err.decode()


@asynccontextmanager
async def door(folder: Path, port: int, *argv: str, model: Path, shard: bool = True) -> AsyncIterator[Door]:
    fake = FakeShard(folder / "shard-0", Traits(max_total_tokens=4000))
    if shard:
        await fake.start()
    base = ["--tokenizer-name", str(model), "--master-shard-uds-path", str(folder / "shard-0")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deepseek_tgi.router", *base, "--hostname", "127.0.0.1", "--port", str(port), *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    found = Door(process, port, fake)
    try:
        yield found
    finally:
        await found.client.aclose()
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await fake.stop()


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--nonsense"], 2, "--nonsense"),
        (["--max-concurrent-requests", "many"], 2, "--max-concurrent-requests: got 'many'"),
        (["--tokenizer-name", "/nowhere/at/all"], 3, "/nowhere/at/all"),
    ],
)
def test_wrong_arguments_end_with_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], code: int, text: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("deepseek_tgi.telemetry.log.configure", lambda *_: None)  # the test run keeps its own logs
    assert main(["--port", "0", "--hostname", "127.0.0.1", *argv]) == code
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


async def test_a_taken_port_is_told_before_the_warm_up(tmp_path: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with door(tmp_path, port, model=model) as found:
            code, error = await found.end()
            assert found.shard.calls == []
    assert code == 5
    assert f"127.0.0.1:{port}: cannot listen: Address already in use" in error


async def test_a_socket_nobody_listens_on_is_named(tmp_path: Path, model: Path, free_port: int) -> None:
    async with door(tmp_path, free_port, model=model, shard=False) as found:
        code, error = await found.end()
    assert code == 1
    assert f"{tmp_path / 'shard-0'}: cannot connect to a shard" in error


@pytest.mark.parametrize(
    ("status", "code"),
    [(grpc.StatusCode.RESOURCE_EXHAUSTED, 5), (grpc.StatusCode.FAILED_PRECONDITION, 2), (grpc.StatusCode.UNKNOWN, 1)],
)
async def test_a_refused_warm_up_ends_with_the_code_of_its_reason(
    tmp_path: Path, model: Path, free_port: int, status: grpc.StatusCode, code: int
) -> None:
    async with door(tmp_path, free_port, model=model) as found:
        found.shard.fail_next["Warmup"] = "too large"
        found.shard.fail_status = status
        assert (await found.end()) == (code, "Error: warm-up failed: too large\n")


@pytest.mark.parametrize(
    ("argv", "warmup", "text"),
    [
        (
            ["--max-batch-prefill-tokens", "9000"],
            None,
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`",
        ),
        (["--validation-workers", "0"], None, "`validation_workers` must be > 0"),
        (["--max-batch-size", "0"], None, "`max_batch_size` must be > 0"),
        (["--max-input-tokens", "9", "--max-total-tokens", "9"], None, "`max_input_tokens` must be <"),
        (["--max-total-tokens", "99"], pb.WarmupResponse(max_input_tokens=1, max_total_tokens=98), "answered 98"),
    ],
)
async def test_limits_that_do_not_fit_are_fatal(
    tmp_path: Path, model: Path, free_port: int, argv: list[str], warmup: pb.WarmupResponse | None, text: str
) -> None:
    async with door(tmp_path, free_port, *argv, model=model) as found:
        if warmup is not None:
            found.shard.on_warmup = lambda _: warmup
        code, error = await found.end()
    assert (code, text in error) == (2, True), error


async def test_a_failed_warm_up_is_fatal(tmp_path: Path, model: Path, free_port: int) -> None:
    async with door(tmp_path, free_port, model=model) as found:
        found.shard.fail_next["Warmup"] = "needs 9 GiB, has 4 GiB"
        code, error = await found.end()
    assert code != 0
    assert "needs 9 GiB, has 4 GiB" in error


async def test_c58_sigterm_lets_streams_finish_and_refuses_new_work(
    tmp_path: Path, model: Path, free_port: int
) -> None:
    wish = {"inputs": "hello", "parameters": {"max_new_tokens": 50}}
    async with door(tmp_path, free_port, "--json-output", model=model) as found:
        await found.up()
        assert await found.ready() == 200
        found.shard.gate.clear()
        running = asyncio.create_task(found.client.post("/generate_stream", json=wish))
        while not found.shard.count("Prefill"):
            await asyncio.sleep(0.005)
        found.process.send_signal(signal.SIGTERM)
        while await found.ready() != 503:
            await asyncio.sleep(0.005)
        refused = await found.client.post("/generate", json=wish)
        assert (refused.status_code, refused.json()["error_type"]) == (503, "not_ready")
        assert (await found.client.get("/health")).status_code == 200
        found.shard.gate.set()
        lines = (await running).text.strip().split("\n\n")
        out, _ = await asyncio.wait_for(found.process.communicate(), 20)
    assert len(lines) == 50
    assert json.loads(lines[-1].removeprefix("data: "))["generated_text"]
    assert found.process.returncode == 0
    logged = [json.loads(line) for line in out.decode().splitlines()]
    assert all({"timestamp", "level", "target"} <= line.keys() for line in logged)


async def test_c58_what_is_left_after_the_drain_time_ends_with_an_error_event(
    tmp_path: Path, model: Path, free_port: int
) -> None:
    wish = {"inputs": "hello", "parameters": {"max_new_tokens": 50}}
    async with door(tmp_path, free_port, "--graceful-termination-timeout", "0", model=model) as found:
        await found.up()
        found.shard.gate.clear()
        running: asyncio.Task[Any] = asyncio.create_task(found.client.post("/generate_stream", json=wish))
        while not found.shard.count("Prefill"):
            await asyncio.sleep(0.005)
        found.process.send_signal(signal.SIGTERM)
        answer = await running
        code, _ = await found.end()
    assert code == 0
    assert json.loads(answer.text.strip().removeprefix("data: "))["error_type"] == "not_ready"


async def test_a_shard_that_dies_fails_its_requests_and_the_health(tmp_path: Path, model: Path, free_port: int) -> None:
    wish = {"inputs": "hello", "parameters": {"max_new_tokens": 2000}}
    async with door(tmp_path, free_port, model=model) as found:
        await found.up()
        running = asyncio.create_task(found.client.post("/generate", json=wish))
        while not found.shard.count("Decode"):
            await asyncio.sleep(0.005)
        await found.shard.stop()
        answer = await running
        assert (answer.status_code, answer.json()["error_type"]) == (424, "generation")
        assert (await found.client.get("/health")).status_code == 503
        found.process.send_signal(signal.SIGINT)
        assert (await found.end())[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_during_the_warm_up_stops_quietly(
    tmp_path: Path, model: Path, free_port: int, number: signal.Signals
) -> None:
    async with door(tmp_path, free_port, model=model) as found:
        found.shard.hold_warmup = asyncio.Event()
        while not found.shard.count("Warmup"):
            await asyncio.sleep(0.005)
        found.process.send_signal(number)
        code, error = await found.end()
        found.shard.hold_warmup.set()
    assert (code, error) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_abort_it(tmp_path: Path, model: Path, free_port: int, closed: str) -> None:
    argv = ["--tokenizer-name", str(model), "--master-shard-uds-path", str(tmp_path / "nobody-0")]
    argv += ["--hostname", "127.0.0.1", "--port", str(free_port)]
    script = f'exec "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "deepseek_tgi.router", *argv], check=False, timeout=60
    )
    assert done.returncode == NotReadyError.exit_code
