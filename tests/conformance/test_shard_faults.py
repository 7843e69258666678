"""Faults in a real shard process, as probes see them: what changes, and how soon.

The bounds are the documented ones plus `SLACK_S` for a busy machine; the shard is the real one around a stub engine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from probe_watch import ProbeWatch
from shard_process import StubShard

from deepseek_tgi.pb import control_pb2, control_pb2_grpc
from deepseek_tgi.pb import generate_pb2 as pb

STALL_LIMIT_S = 2.0
SLACK_S = 1.0
SOON_S = 1.0
"""Readiness falls within this of a failed or hung forward."""


@dataclass
class Bench:
    """A warm shard with a probe port, and a prober at work."""

    shard: StubShard
    watch: ProbeWatch
    device: Path
    told: grpc.Future | None = None

    def tell(self, text: str) -> float:
        """Let the engine do something, without waiting for it; when it was told."""
        self.told = self.call(text)  # a call that nobody holds is cancelled
        self.shard.wait_for_line("told to")
        return time.monotonic()

    def call(self, text: str) -> grpc.Future:
        return self.shard.stub.Prefill.future(prefill(text), timeout=60)


def prefill(text: str) -> pb.PrefillRequest:
    stop = pb.StoppingCriteriaParameters(max_new_tokens=1)
    return pb.PrefillRequest(batch=pb.Batch(requests=[pb.Request(inputs=text, truncate=9, stopping_parameters=stop)]))


@pytest.fixture
def bench(tmp_path: Path, free_port: int) -> Iterator[Bench]:
    device = tmp_path / "device"
    environ = {
        "DEEPSEEK_TGI_SHARD_PROBE_PORT": str(free_port),
        "DEEPSEEK_TGI_STALL_LIMIT": str(STALL_LIMIT_S),
        "STUB_DEVICE": str(device),
    }
    with StubShard(tmp_path / "shard", environ) as shard, ProbeWatch(free_port) as watch:
        shard.wait_ready()
        shard.warm()
        watch.wait("readyz", 200, 20)
        watch.changes.clear()
        yield Bench(shard, watch, device)


def test_an_engine_that_hangs_is_unready_within_a_second_and_dead_at_the_limit(bench: Bench) -> None:
    told = bench.tell("sleep 60")
    fell = bench.watch.wait("readyz", 503, SOON_S + SLACK_S)
    assert fell.at - told < SOON_S + SLACK_S
    assert "the engine thread, in Prefill, has stood still" in fell.text
    assert bench.watch.status("livez") == 200
    dead = bench.watch.wait_for_no("livez", STALL_LIMIT_S + SOON_S + SLACK_S)
    assert STALL_LIMIT_S - 0.2 < dead.at - told < STALL_LIMIT_S + SOON_S + SLACK_S
    assert bench.shard.process.wait(15) == 1, "and leaves, for whoever restarts it"


def test_an_engine_that_computes_and_gets_nowhere_is_dead_at_the_limit_and_no_sooner(bench: Bench) -> None:
    told = bench.tell("spin 60")
    dead = bench.watch.wait_for_no("livez", STALL_LIMIT_S + SOON_S + 3 * SLACK_S)
    assert dead.at - told > STALL_LIMIT_S - 0.2
    assert bench.watch.wait_for_no("readyz", 1).at - told > STALL_LIMIT_S - 0.2
    assert bench.shard.process.wait(15) == 1


def test_long_work_that_makes_progress_is_no_fault(bench: Bench) -> None:
    call = bench.call(f"work {2 * STALL_LIMIT_S}")
    assert call.result(30).generations
    assert (bench.watch.seen("livez"), bench.watch.seen("readyz")) == ([200], [200])
    assert max(bench.watch.latencies_s) < 0.5


def test_a_step_that_raises_is_unready_at_once_and_a_generated_token_proves_recovery(bench: Bench) -> None:
    told = bench.tell("raise the model is broken")
    fell = bench.watch.wait("readyz", 503, SOON_S + SLACK_S)
    assert fell.at - told < SOON_S + SLACK_S
    assert "a step failed: the model is broken" in fell.text
    assert bench.watch.wait("readyz", 200, 2 + SLACK_S)
    assert bench.watch.seen("livez") == [200]


def test_a_request_that_is_refused_is_no_fault(bench: Bench) -> None:
    assert bench.call("refuse it is wrong").exception() is not None
    time.sleep(0.3)
    assert bench.watch.seen("readyz") == [200]


def test_a_device_that_fails_ends_the_process(bench: Bench) -> None:
    told = bench.tell("fatal the bus is gone")
    assert bench.watch.wait_for_no("livez", SOON_S + SLACK_S).at - told < SOON_S + SLACK_S
    assert bench.shard.process.wait(15) == 1


def test_a_process_that_crashes_answers_nobody(bench: Bench) -> None:
    told = time.monotonic()
    bench.told = bench.call("crash")
    assert bench.watch.wait_for_no("livez", SOON_S + SLACK_S).at - told < SOON_S + SLACK_S
    assert bench.shard.process.wait(5) == -signal.SIGSEGV


def test_a_device_check_that_fails_twice_in_a_row_counts_and_heals(bench: Bench) -> None:
    bench.device.write_text("raise no memory")
    fell = bench.watch.wait("readyz", 503, 8)
    assert "device: no memory" in fell.text
    bench.device.unlink()
    bench.watch.wait("readyz", 200, 8)
    assert bench.watch.seen("livez") == [200]


def test_a_device_check_that_hangs_is_a_thread_that_stands_still(bench: Bench) -> None:
    bench.device.write_text("sleep 1.4")
    assert "in the device check, has stood still" in bench.watch.wait("readyz", 503, 6).text
    bench.device.unlink()
    bench.watch.wait("readyz", 200, 6)
    assert bench.watch.seen("livez") == [200]


def test_a_stopped_process_answers_nobody_and_holds_nothing_against_itself_afterwards(bench: Bench) -> None:
    os.kill(bench.shard.process.pid, signal.SIGSTOP)
    bench.watch.wait("livez", 0, 3)
    time.sleep(STALL_LIMIT_S)
    os.kill(bench.shard.process.pid, signal.SIGCONT)
    bench.watch.wait("livez", 200, 5)
    bench.watch.wait("readyz", 200, 5)
    assert 503 not in bench.watch.seen("livez")


def test_heartbeats_stop_with_the_process(bench: Bench) -> None:
    control = control_pb2_grpc.ModelControlStub(bench.shard.channel)
    stream = control.Watch(control_pb2.WatchRequest(heartbeat_ms=50))
    first = next(stream)
    assert (first.kind, first.state) == (control_pb2.Increment.SNAPSHOT, "ready")
    beats = [next(stream) for _ in range(3)]
    assert {beat.kind for beat in beats} == {control_pb2.Increment.HEARTBEAT}
    assert all(beat.progress_age_ms < 5000 and not beat.busy for beat in beats)
    heard: list[float] = []

    def listen() -> None:
        try:
            for _ in stream:
                heard.append(time.monotonic())
        except grpc.RpcError:
            return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    os.kill(bench.shard.process.pid, signal.SIGSTOP)
    time.sleep(0.3)
    stopped = len(heard)
    time.sleep(0.7)
    assert len(heard) == stopped
    os.kill(bench.shard.process.pid, signal.SIGCONT)
    stream.cancel()
    thread.join(5)


def test_a_watcher_that_comes_late_catches_up_in_order(bench: Bench) -> None:
    control = control_pb2_grpc.ModelControlStub(bench.shard.channel)
    stream = control.Watch(control_pb2.WatchRequest(from_seq=1))
    caught = [next(stream) for _ in range(4)]
    stream.cancel()
    assert [(each.seq, each.event, each.state) for each in caught] == [
        (1, "load", "loading"), (2, "loaded", "warming"), (3, "warm", "warming"), (4, "warmed", "ready"),
    ]  # fmt: skip


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_a_shard_that_is_to_leave_is_unready_at_once_and_serves_what_runs(bench: Bench) -> None:
    stub = bench.shard.stub
    batch = pb.Batch(id=4, requests=[pb.Request(id=1, inputs="x", truncate=9)])
    batch.requests[0].stopping_parameters.max_new_tokens = 9
    assert stub.Prefill(pb.PrefillRequest(batch=batch), timeout=10).batch.id == 4
    bench.shard.process.terminate()
    fell = bench.watch.wait("readyz", 503, SOON_S + SLACK_S)
    assert "[-]shutdown failed: draining" in fell.text
    for _ in range(8):  # longer than it would stay for nobody
        assert stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=4)]), timeout=10).batch.id == 4
        time.sleep(0.2)
    assert bench.watch.status("livez") == 200
    with pytest.raises(grpc.RpcError, match="the shard is draining"):
        stub.Prefill(prefill("y"), timeout=10)
    stub.ClearCache(pb.ClearCacheRequest(id=4), timeout=10)
    assert bench.shard.process.wait(5) == 0


def test_requests_that_lost_their_router_do_not_hold_a_shard(bench: Bench) -> None:
    batch = pb.Batch(id=4, requests=[pb.Request(id=1, inputs="x", truncate=9)])
    batch.requests[0].stopping_parameters.max_new_tokens = 9
    bench.shard.stub.Prefill(pb.PrefillRequest(batch=batch), timeout=10)
    bench.shard.process.terminate()
    assert bench.shard.process.wait(5) == 0


def test_a_second_signal_ends_it_at_once(bench: Bench) -> None:
    bench.tell("sleep 60")
    bench.shard.process.terminate()
    time.sleep(0.4)
    assert bench.shard.process.poll() is None
    bench.shard.process.terminate()
    assert bench.shard.process.wait(2) == 128 + signal.SIGTERM
    assert not bench.shard.path.exists()


def test_the_echo_of_one_signal_is_not_a_second(bench: Bench) -> None:
    call = bench.call("sleep 1")
    bench.shard.wait_for_line("told to")
    for _ in range(2):
        bench.shard.process.terminate()
    assert call.result(10).generations
    assert bench.shard.process.wait(5) == 0


# --- a model that loads, or does not ----------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, free_port: int) -> Iterator[Callable[..., tuple[StubShard, ProbeWatch]]]:
    started: list[tuple[StubShard, ProbeWatch]] = []

    def make(**environ: str) -> tuple[StubShard, ProbeWatch]:
        shard = StubShard(tmp_path / "shard", {"DEEPSEEK_TGI_SHARD_PROBE_PORT": str(free_port), **environ})
        watch = ProbeWatch(free_port)
        started.append((shard.__enter__(), watch.__enter__()))
        return started[-1]

    yield make
    for shard, watch in started:
        watch.__exit__()
        shard.__exit__()


def test_a_shard_that_loads_is_live_and_neither_started_nor_ready(
    start: Callable[..., tuple[StubShard, ProbeWatch]],
) -> None:
    shard, watch = start(STUB_LOAD_S="2")
    watch.wait("livez", 200, 20)
    assert watch.wait("startupz", 503, 5).text == "[+]ping ok\n[-]model failed: loading\nstartupz check failed\n"
    shard.wait_ready()
    assert (watch.status("readyz"), watch.status("startupz")) == (503, 503), "loaded, and not warm"
    shard.warm()
    watch.wait("startupz", 200, 5)
    watch.wait("readyz", 200, 5)
    assert 503 not in watch.seen("livez")
    assert watch.seen("startupz")[-2:] == [503, 200]


def test_a_load_that_fails_is_never_ready(start: Callable[..., tuple[StubShard, ProbeWatch]]) -> None:
    shard, watch = start(STUB_LOAD_S="1", STUB_FAIL="model.safetensors: truncated")
    watch.wait("livez", 200, 20)
    assert shard.process.wait(20) == 3
    watch.wait("livez", 0, 5)
    assert 200 not in watch.seen("readyz") + watch.seen("startupz")
