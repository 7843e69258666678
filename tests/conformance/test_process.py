"""The process lines of the TGI contract's checklist (1 to 10): argv, socket, log lines, signals, stdin, death.

The shard is the real one around an engine without a model (`stub_shard.py`); the real model has its own tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb import generate_pb2_grpc as pb_grpc

STUB = str(Path(__file__).parents[1] / "stub_shard.py")
LEVELS = {"TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL"}
SERVER = [sys.executable, "-m", "deepseek_tgi.server"]


class Shard:
    """One stub shard, started as the launcher starts it."""

    def __init__(
        self, stem: Path, extra: list[str], stdin: int | None, environ: dict[str, str], closed: bool = False
    ) -> None:
        self.path = Path(f"{stem}-{environ.get('RANK', '0')}")
        argv = ["serve", "some/model", "--uds-path", str(stem), "--json-output", *extra, "--otlp-service-name", "name"]
        self.process = subprocess.Popen(
            # A shell closes the child's descriptor 0: were it closed here, the next file would take its number.
            [*(["sh", "-c", 'exec "$@" <&-', "sh"] if closed else []), sys.executable, STUB, *argv],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TOTALLY_UNKNOWN": "1", **environ},
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 30
        while not self.path.exists():
            assert self.process.poll() is None, self.process.communicate()[1].decode()
            assert time.monotonic() < deadline, "no socket"
            time.sleep(0.005)

    def end(self, timeout_s: float) -> int:
        code: int = self.process.wait(timeout_s)
        return code

    def output(self) -> tuple[bytes, bytes]:
        """stdout and stderr; the process must have ended."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout as out, self.process.stderr as err:
            return out.read(), err.read()

    def wait_for_line(self, words: str) -> None:
        """Read stdout up to the line with `words`."""
        assert self.process.stdout is not None
        while words.encode() not in (line := self.process.stdout.readline()):
            assert line, f"ended without saying {words!r}"

    def calls(self) -> tuple[grpc.Channel, pb_grpc.TextGenerationServiceStub]:
        channel = grpc.insecure_channel(f"unix:{self.path}", options=[("grpc.use_local_subchannel_pool", 1)])
        return channel, pb_grpc.TextGenerationServiceStub(channel)


Start = Callable[..., Shard]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts shards; whatever still runs at the end is killed."""
    started: list[Shard] = []

    def make(
        *extra: str,
        stdin: int | None = subprocess.PIPE,
        stem: Path | None = None,
        closed: bool = False,
        **environ: str,
    ) -> Shard:
        started.append(Shard(stem or tmp_path / "shard", list(extra), stdin, environ, closed))
        return started[-1]

    yield make
    for shard in started:
        shard.process.kill()
        shard.process.wait()
        for stream in (shard.process.stdin, shard.process.stdout, shard.process.stderr):
            if stream is not None:
                stream.close()


def warm(stub: pb_grpc.TextGenerationServiceStub) -> None:
    stub.Warmup(pb.WarmupRequest(batch=pb.Batch(requests=[prompt("x")]), max_prefill_tokens=64), timeout=20)


def prompt(text: str) -> pb.Request:
    return pb.Request(inputs=text, truncate=9, stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1))


def prefill(text: str) -> pb.PrefillRequest:
    return pb.PrefillRequest(batch=pb.Batch(requests=[prompt(text)]))


# Line 1


def download(model: str, **environ: str) -> subprocess.CompletedProcess[str]:
    argv = ["download-weights", model, "--extension", ".safetensors", "--logger-level", "INFO", "--json-output"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_ENABLE_HF_TRANSFER": "1", **environ}
    return subprocess.run(
        [*SERVER, *argv, "--merge-lora"], env=env, capture_output=True, text=True, check=False, timeout=60
    )


def test_line_1_weights_that_are_there_take_no_time(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    started = time.monotonic()
    assert download(str(tmp_path)).returncode == 0
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("model", ["/no/such/folder", "no-such-owner/no-such-model"])
def test_line_1_weights_that_cannot_be_had_are_an_error_with_a_reason(model: str) -> None:
    done = download(model)
    assert done.returncode not in (0, None)
    assert model in done.stderr
    assert "Traceback" not in done.stderr


def test_line_1_half_a_model_is_not_a_model(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    done = download(str(tmp_path))
    assert done.returncode == 3
    assert "model-2.safetensors" in done.stderr


# Lines 2 and 6


@pytest.mark.parametrize("level", ["OFF", "ERROR", "WARN", "INFO", "DEBUG", "TRACE"])
def test_lines_2_and_6_every_flag_and_level_works(level: str, start: Start) -> None:
    flags = (
        "--trust-remote-code --quantize awq --speculate 0 --dtype bfloat16 --kv-cache-dtype fp8_e5m2 --revision main"
    )
    shard = start("--logger-level", level, *flags.split(), "--max-input-tokens", "100")
    shard.wait_ready()
    shard.process.terminate()
    assert shard.end(5) == 0
    out, _ = shard.output()
    assert bool(out) == (level in {"INFO", "DEBUG", "TRACE"})


# Line 3


def test_line_3_the_path_appears_only_when_a_call_succeeds(start: Start, tmp_path: Path) -> None:
    for number in range(5):
        shard = start(stem=tmp_path / f"s{number}", STUB_LOAD_S="0.2")
        shard.wait_ready()
        channel, stub = shard.calls()
        with channel:
            # No retries, no waiting: the first connection must work, as the router's must.
            urls = stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), wait_for_ready=False, timeout=5).urls
        assert list(urls) == [f"unix://{shard.path}"]
        shard.process.kill()


# Line 4


def test_line_4_a_dead_sockets_file_does_not_matter(start: Start) -> None:
    first = start()
    first.wait_ready()
    first.process.kill()
    first.process.wait()
    assert first.path.exists()
    inode = first.path.stat().st_ino
    second = start(STUB_LOAD_S="0.2")
    deadline = time.monotonic() + 20
    while first.path.stat().st_ino == inode:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    channel, stub = second.calls()
    with channel:
        stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=5)


def test_line_4_a_living_shard_is_not_pushed_aside(start: Start) -> None:
    start().wait_ready()
    second = start()
    assert second.end(20) == 5
    assert b"in use by a running shard" in second.output()[1]


# Line 5


def test_line_5_each_stdout_line_is_a_short_json_object(start: Start) -> None:
    shard = start("--logger-level", "TRACE")
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:
        warm(stub)
        with pytest.raises(grpc.RpcError):
            stub.Prefill(prefill("raise " + '\u4f60 \n"' * 5000), timeout=20)
    shard.process.terminate()
    assert shard.end(5) == 0
    lines = shard.output()[0].splitlines(keepends=True)
    assert len(lines) > 3
    for line in lines:
        record = json.loads(line)
        assert isinstance(record["text"], str)
        assert record["record"]["level"]["name"] in LEVELS
        assert len(line) <= 4096
        assert line.endswith(b"\n")


# Line 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_line_7_an_idle_shard_leaves_at_once(number: signal.Signals, start: Start) -> None:
    shard = start()
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:  # the router's open connection is no reason to stay
        warm(stub)
        shard.process.send_signal(number)
        assert shard.end(5) == 0
    assert not shard.path.exists()
    assert list(shard.path.parent.iterdir()) == []


def test_line_7_a_busy_shard_finishes_its_call_first(start: Start) -> None:
    shard = start()
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:
        warm(stub)
        running = stub.Prefill.future(prefill("sleep 1.0"), timeout=20)
        shard.wait_for_line("told to sleep")
        shard.process.terminate()
        assert running.result().generations
    assert shard.end(5) == 0


def test_line_7_a_call_that_does_not_end_is_not_waited_for_forever(start: Start) -> None:
    shard = start(DEEPSEEK_TGI_STOP_TIMEOUT="0.5")
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:
        warm(stub)
        running = stub.Prefill.future(prefill("sleep 60"), timeout=20)
        shard.wait_for_line("told to sleep")
        shard.process.terminate()
        assert shard.end(5) == 0
        assert running.exception() is not None


def test_line_7_a_shard_that_loads_leaves_too(start: Start) -> None:
    shard = start("--logger-level", "INFO", STUB_LOAD_S="60")
    shard.wait_for_line("loading")
    shard.process.terminate()
    assert shard.end(5) == 0
    assert not shard.path.exists()


# Line 8


@pytest.mark.parametrize("loading", ["0", "60"])
def test_line_8_the_end_of_stdin_ends_the_process(loading: str, start: Start) -> None:
    shard = start("--logger-level", "INFO", STUB_LOAD_S=loading)
    assert shard.process.stdin is not None
    shard.wait_for_line("loading")
    shard.process.stdin.write(b"what the launcher's own stdin says\n")
    shard.process.stdin.close()
    assert shard.end(5) == 0


@pytest.mark.parametrize("kind", ["null", "closed", "pipe at its end", "terminal"])
def test_line_8_a_stdin_that_was_never_open_is_no_reason_to_leave(kind: str, start: Start) -> None:
    read_end, write_end = os.openpty() if kind == "terminal" else os.pipe()
    if kind != "terminal":
        os.close(write_end)
    if kind == "closed":
        shard = start(stdin=None, closed=True)
    else:
        shard = start(stdin=subprocess.DEVNULL if kind == "null" else read_end)
    shard.wait_ready()
    with pytest.raises(subprocess.TimeoutExpired):
        shard.end(0.7)
    os.close(read_end)
    if kind == "terminal":
        os.close(write_end)


# Line 9


def test_line_9_a_model_that_cannot_load_is_told_on_stderr(start: Start) -> None:
    shard = start("--logger-level", "INFO", STUB_FAIL="config.json: vocab_size is missing")
    assert shard.end(20) == 3
    out, err = shard.output()
    assert b"CheckpointError: config.json: vocab_size is missing" in err
    assert json.loads(out.splitlines()[-1])["record"]["level"]["name"] == "ERROR"
    assert not shard.path.exists()


def test_line_9_the_real_server_too(tmp_path: Path) -> None:
    argv = [
        *SERVER,
        "serve",
        str(tmp_path),
        "--uds-path",
        str(tmp_path / "s"),
        "--logger-level",
        "INFO",
        "--json-output",
    ]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected: text-generation-server serve MODEL_ID"),
        (["sevre", "m"], "got 'sevre'"),
        (["serve"], "no model"),
        (["serve", "m", "--udspath", "x"], "did you mean --uds-path"),
        (["serve", "m", "--uds-path", "/no/such/folder/s"], "'/no/such/folder' is not a folder"),
        (["serve", "m", "--uds-path", "/tmp/" + "x" * 120], "a unix socket allows 107"),
    ],
)
def test_line_9_wrong_options_are_told_before_anything_is_loaded(argv: list[str], message: str) -> None:
    done = subprocess.run(
        [*SERVER, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in (2, 5)
    assert message in done.stderr


# Line 10


def test_line_10_both_ranks_list_both_urls_in_rank_order(start: Start, tmp_path: Path) -> None:
    ranks = [start("--sharded", RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    for rank, shard in enumerate(ranks):
        shard.wait_ready()
        assert shard.path == tmp_path / f"shard-{rank}"
        channel, stub = shard.calls()
        with channel:
            urls = list(stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=5).urls)
        assert urls == [f"unix://{tmp_path}/shard-0", f"unix://{tmp_path}/shard-1"]


def test_line_10_a_rank_beyond_the_world_is_refused(start: Start) -> None:
    shard = start(RANK="2", WORLD_SIZE="2")
    assert shard.end(20) == 2
    assert b"expected a rank below the world size" in shard.output()[1]


# Beyond the list: what else the neighbours rely on


def test_a_failed_device_ends_the_process_after_the_answer(start: Start) -> None:
    shard = start()
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:
        warm(stub)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Prefill(prefill("fatal the bus is gone"), timeout=20)
    assert caught.value.details() == "the bus is gone"
    assert shard.end(5) == 1


def test_a_dead_trace_collector_delays_nothing(start: Start) -> None:
    shard = start("--otlp-endpoint", "http://192.0.2.1:4317")  # a documentation address: nobody answers
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:
        warm(stub)
        started = time.monotonic()
        for _ in range(20):
            assert stub.Prefill(prefill("x"), timeout=5).generations
        assert time.monotonic() - started < 2
        shard.process.terminate()
        assert shard.end(5) == 0


def test_standard_health_and_reflection_tell_the_state(start: Start) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    shard = start()
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:
        health = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service="generate.v3.TextGenerationService")
        assert health.Check(ask, timeout=5).status == health_pb2.HealthCheckResponse.NOT_SERVING
        warm(stub)
        assert health.Check(ask, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert "generate.v3.TextGenerationService" in services


def test_metrics_are_served_on_request(start: Start, free_port: int) -> None:
    import urllib.request

    shard = start(DEEPSEEK_TGI_METRICS_PORT=str(free_port))
    shard.wait_ready()
    channel, stub = shard.calls()
    with channel:
        warm(stub)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{free_port}/metrics", timeout=5) as answer:
        shown = answer.read().decode()
    assert 'deepseek_tgi_rpc_duration_count{method="Warmup"} 1.0' in shown
    assert 'deepseek_tgi_state{state="ready"} 1.0' in shown


def test_fifty_megabytes_come_in(start: Start) -> None:
    shard = start()
    shard.wait_ready()
    channel, stub = shard.calls()
    big = prefill("x")
    big.batch.requests[0].slots.extend(range(10_000_000))
    assert big.ByteSize() > 35_000_000
    done = threading.Event()
    with channel:
        warm(stub)
        answer = stub.Prefill.future(big, timeout=60)
        answer.add_done_callback(lambda _: done.set())
        assert done.wait(60)
        assert answer.result().generations
