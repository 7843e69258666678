"""The pod of the default values, run as a kubelet would: start, faults and the end, under constant requests.

What must hold: requests are sent only where they are answered, and only what has died is started anew.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from helm_chart import Rendered, render
from kubelet import Kubelet
from kubelet_prober import Probe, Result
from launched_server import descendants, free_port

from deepseek_tgi.kernels.compiler import cache_folder

PERIOD_SCALE = 0.1
ROUTE_LAG_S = 0.7
PRE_STOP_S = 1
DRAIN_S = 60
START_S = 150.0
SOON_S = 1.0
"""README: readiness falls within this of a shard that stands still."""
SLACK_S = 2.5
"""For two failures in a row, and a busy machine."""
CAPITAL = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 2}}


@dataclass(frozen=True)
class Answer:
    """What one request came to: 0 is a connection that failed."""

    sent: float
    ended: float
    status: int
    text: str


@dataclass
class Clients:
    """Send requests one after the other while the cluster would; a context manager."""

    kubelet: Kubelet
    url: str
    answers: list[Answer] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Clients:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(70)

    def _run(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._over.wait(0.02):
                if self.kubelet.routed:
                    self.answers.append(self._one(client))

    def _one(self, client: httpx.Client) -> Answer:
        sent = time.monotonic()
        try:
            got = client.post(f"{self.url}/generate", json=CAPITAL, headers={"connection": "close"})
            return Answer(sent, time.monotonic(), got.status_code, got.text)
        except httpx.HTTPError as error:
            return Answer(sent, time.monotonic(), 0, repr(error))

    def failed(self) -> list[Answer]:
        """All that were not served."""
        return [answer for answer in self.answers if answer.status != 200]


@dataclass
class Cluster:
    """The pod, its clients, and the objects it was made from."""

    kubelet: Kubelet
    clients: Clients
    objects: Rendered
    others: tuple[Rendered, ...]
    folder: Path

    @property
    def url(self) -> str:
        return self.clients.url

    def shard(self) -> int:
        """The process that holds the model."""
        assert self.kubelet.process is not None
        below = descendants(self.kubelet.process.pid)
        return next(pid for pid, line in below.items() if "uds-path" in line and " serve " in line)

    def others_say(self, kind: str) -> list[Result | None]:
        """What the same probe says where it is a command, and where readiness is asked over gRPC."""
        specs = [other.server[f"{kind}Probe"] for other in self.others]
        return [Probe(spec, self.kubelet.ports, self.kubelet.environment).ask() for spec in specs]

    def words(self) -> str:
        return (self.folder / "container.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def cluster(any_helm: str) -> Iterator[Cluster]:
    values = {
        "server.port": free_port(),
        "probes.port": free_port(),
        "metrics.port": free_port(),
        "grpc.enabled": True,
        "grpc.port": free_port(),
        "drain.preStopSeconds": PRE_STOP_S,
        "drain.limitSeconds": DRAIN_S,
        # A small largest step: a start runs it once.
        "model.maxInputTokens": 128,
        "model.maxTotalTokens": 2048,
        "server.extraArgs": ["--shard-uds-path=/tmp/s", "--max-batch-prefill-tokens=128"],
    }
    objects = render(any_helm, values=values)
    others = tuple(render(any_helm, values={**values, "probes.handler": handler}) for handler in ("exec", "grpc"))
    with tempfile.TemporaryDirectory(prefix="pod-") as name:
        # Kernels that this machine has compiled before are not compiled anew.
        folders = {"/cache/made": cache_folder(), "/cache": Path(name), "/models": Path(name)}
        folders["/tmp"] = Path(name)
        kubelet = Kubelet(objects.pod, folders, PERIOD_SCALE, ROUTE_LAG_S)
        clients = Clients(kubelet, f"http://127.0.0.1:{values['server.port']}")
        with kubelet, clients:
            yield Cluster(kubelet, clients, objects, others, Path(name))


def test_a_life_of_the_pod(cluster: Cluster) -> None:
    """One test: each part begins where the one before ended, and a start is dear."""
    it_starts(cluster)
    a_frozen_shard_gets_no_requests_and_no_restart(cluster)
    a_killed_shard_is_a_restart(cluster)
    it_leaves_without_losing_a_request(cluster)


def it_starts(cluster: Cluster) -> None:
    kubelet = cluster.kubelet
    started = kubelet.await_note("startup success", START_S)
    ready = kubelet.await_note("readiness success", 30)
    assert not cluster.clients.answers or cluster.clients.answers[0].sent > started
    assert ready >= started
    await_answers(cluster, 3)
    for kind in ("startup", "readiness", "liveness"):
        assert cluster.others_say(kind) == [Result.SUCCESS, Result.SUCCESS], kind
    assert helm_test(cluster).returncode == 0, helm_test(cluster)
    assert cluster.clients.failed() == []
    assert kubelet.times("restarted") == []


def a_frozen_shard_gets_no_requests_and_no_restart(cluster: Cluster) -> None:
    kubelet, shard = cluster.kubelet, cluster.shard()
    frozen = time.monotonic()
    os.kill(shard, signal.SIGSTOP)
    try:
        fell = kubelet.await_note("readiness failure", SOON_S + SLACK_S)
        assert fell - frozen < SOON_S + SLACK_S
        assert not kubelet.routed
        assert cluster.others_say("readiness") == [Result.FAILURE, Result.FAILURE]
        assert cluster.others_say("liveness") == [Result.SUCCESS, Result.SUCCESS]
        refused = helm_test(cluster)
        assert (refused.returncode, "/readyz: 503" in refused.stderr) == (1, True)
    finally:
        os.kill(shard, signal.SIGCONT)
    kubelet.await_note("readiness success", 15, count=2)
    await_answers(cluster, 3)
    assert [
        answer for answer in cluster.clients.answers if fell < answer.sent < kubelet.times("readiness success")[1]
    ] == []
    assert cluster.clients.failed() == [], "what was under way is only late"
    assert not [note for note in kubelet.notes if "liveness" in note.what or "restarted" in note.what]


def a_killed_shard_is_a_restart(cluster: Cluster) -> None:
    kubelet = cluster.kubelet
    killed = time.monotonic()
    os.kill(cluster.shard(), signal.SIGKILL)
    noticed = kubelet.await_note("restarted", 30)
    assert kubelet.times("exited 1"), kubelet.notes
    assert not [note for note in kubelet.notes if note.what.startswith("killed")], "it leaves by itself"
    unready = min([at for at in kubelet.times("readiness failure") if at > killed] + [noticed])
    assert unready - killed < SOON_S + SLACK_S
    ready = kubelet.await_note("readiness success", START_S, count=3)
    before = len(cluster.clients.answers)
    await_answers(cluster, before + 3)
    for answer in cluster.clients.failed():
        assert answer.ended > killed, answer
        assert answer.sent < unready, f"sent to a pod that was known not to be ready: {answer}"
    assert not [answer for answer in cluster.clients.answers if unready < answer.sent < ready]


def it_leaves_without_losing_a_request(cluster: Cluster) -> None:
    kubelet = cluster.kubelet
    lost_before = len(cluster.clients.failed())
    with long_story(cluster.url) as story:
        next(story)
        asked = time.monotonic()
        end = EndOfPod(kubelet)
        told = [json.loads(line.removeprefix("data:")) for line in story if line.startswith("data:")][-1]
        story_ended = time.monotonic()
    assert end.exit_code() == 0, cluster.words()[-2000:]
    assert told.get("details", {}).get("finish_reason") == "length", told
    assert asked + ROUTE_LAG_S < kubelet.times("SIGTERM")[-1] < story_ended, "it was under way when the signal came"
    assert kubelet.times("SIGKILL") == []
    sent_meanwhile = [answer.status for answer in cluster.clients.answers if answer.sent > asked]
    assert set(sent_meanwhile) == {200}, "the cluster goes on sending for a moment"
    assert cluster.clients.failed()[lost_before:] == []
    assert not [note for note in kubelet.notes if note.what.startswith(("killed", "liveness"))]


class EndOfPod:
    """The pod's deletion, under way."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self._codes.append(kubelet.delete()))
        self._thread.start()

    def exit_code(self) -> int:
        """The container's, once it has ended."""
        self._thread.join()
        return self._codes[0]


@contextmanager
def long_story(url: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that takes seconds; a grammar keeps it from ending before."""
    grammar = {"type": "regex", "value": "[a-z ]{4000}"}
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 700, "details": True, "grammar": grammar}}
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=60, trust_env=False) as answer:
        yield answer.iter_lines()


def await_answers(cluster: Cluster, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(cluster.clients.answers) < count:
        assert time.monotonic() < deadline, cluster.words()[-2000:]
        time.sleep(0.02)


def helm_test(cluster: Cluster) -> subprocess.CompletedProcess[str]:
    """The command of the pod that `helm test` makes, with the Service's name resolved."""
    (container,) = cluster.objects.one("Pod")["spec"]["containers"]
    name = cluster.objects.one("Service")["metadata"]["name"]
    script: list[str] = [*container["command"], *container["args"]]
    assert script.pop() == f"http://{name}:80"
    return subprocess.run(
        [*script, cluster.url], capture_output=True, text=True, timeout=60, env=cluster.kubelet.environment, check=False
    )
