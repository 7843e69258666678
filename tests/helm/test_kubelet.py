"""What the chart's probes lead to, face by face: a scripted container says what a server would, a kubelet decides.

It also shows that wrong wiring is seen: the same faces behind the wrong probes end in a restart, or in lost requests.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from helm_chart import Document, render
from kubelet import Kubelet
from launched_server import await_true, free_port

SCRIPTED = Path(__file__).with_name("scripted_container.py")
STARTING = {"/startupz": 503, "/readyz": 503, "/livez": 200}
READY = {"/startupz": 200, "/readyz": 200, "/livez": 200}
DEGRADED = {"/startupz": 200, "/readyz": 503, "/livez": 200}
FAILED = {"/startupz": 200, "/readyz": 503, "/livez": 503}
PERIOD_SCALE = 0.05
SEVERAL_PERIODS_S = 0.6


class Stage:
    """A kubelet, and the file that its container reads."""

    def __init__(self, kubelet: Kubelet, file: Path) -> None:
        self.kubelet = kubelet
        self._file = file

    def play(self, **more: Any) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(more))
        new.rename(self._file)

    def happened(self, start: str) -> list[str]:
        return [note.what for note in self.kubelet.notes if note.what.startswith(start)]


Play = Callable[..., Stage]


@pytest.fixture
def stage(any_helm: str) -> Iterator[Play]:
    with ExitStack() as stack:

        def make(faces: dict[str, int], change: Callable[[Document], None] = lambda pod: None, **values: Any) -> Stage:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pod-")))
            port = free_port()
            values = {"probes.port": port, "drain.preStopSeconds": 0, "probes.startup.limitSeconds": 60, **values}
            pod = deepcopy(render(any_helm, values=values).pod)
            (container,) = pod["spec"]["containers"]
            container["command"] = [sys.executable, "-S", str(SCRIPTED), str(port), "/cache/script"]
            container["args"] = []
            change(pod)
            kubelet = Kubelet(pod, {"/tmp": folder, "/cache": folder, "/models": folder}, PERIOD_SCALE, 0.3)
            made = Stage(kubelet, folder / "script")
            made.play(**faces)
            stack.enter_context(kubelet)
            return made

        yield make


def test_a_long_start_is_waited_for_and_a_fault_takes_requests_away(stage: Play) -> None:
    played = stage(STARTING)
    assert not played.kubelet.routed
    played.play(**READY)
    played.kubelet.await_note("readiness success", 20)
    played.play(**DEGRADED)
    played.kubelet.await_note("readiness failure", 20)
    assert not played.kubelet.routed
    played.play(**READY)
    await_true(lambda: played.kubelet.routed, "requests come again")
    assert played.happened("killed") == played.happened("liveness") == []


def test_what_is_not_live_is_started_anew_and_gets_no_requests_before_it_is_ready(stage: Play) -> None:
    played = stage(READY)
    played.kubelet.await_note("readiness success", 20)
    played.play(**FAILED)
    played.kubelet.await_note("killed by liveness", 20)
    played.play(**STARTING)
    played.kubelet.await_note("restarted", 20)
    assert not played.kubelet.routed
    played.play(**READY)
    played.kubelet.await_note("startup success", 20, count=2)
    await_true(lambda: played.kubelet.routed, "requests come again")
    assert len(played.happened("killed")) == 1


def test_a_start_that_succeeds_at_its_first_look_counts_after_every_restart(stage: Play) -> None:
    def start_at_once(pod: Document) -> None:
        (container,) = pod["spec"]["containers"]
        del container["startupProbe"]["httpGet"]
        container["startupProbe"]["exec"] = {"command": ["true"]}

    played = stage(READY, start_at_once)
    played.kubelet.await_note("readiness success", 20)
    played.play(**FAILED)
    played.kubelet.await_note("killed by liveness", 20)
    played.play(**READY)
    played.kubelet.await_note("startup success", 20, count=2)
    await_true(lambda: played.kubelet.routed, "requests come again")


def test_a_start_beyond_its_limit_is_ended(stage: Play) -> None:
    played = stage(STARTING, **{"probes.startup.limitSeconds": 10})
    played.kubelet.await_note("killed by startup", 20)
    assert played.happened("readiness") == []


def test_a_container_that_does_not_hear_is_killed_when_its_time_is_over(stage: Play) -> None:
    def hurry(pod: Document) -> None:
        pod["spec"]["terminationGracePeriodSeconds"] = 1

    played = stage(READY | {"deaf": 1}, hurry)
    played.kubelet.await_note("readiness success", 20)
    assert played.kubelet.delete() == -9
    assert played.happened("SIG") == ["SIGTERM", "SIGKILL"]


def test_liveness_at_the_readiness_face_would_restart_a_server_that_recovers(stage: Play) -> None:
    def miswire(pod: Document) -> None:
        (container,) = pod["spec"]["containers"]
        container["livenessProbe"]["httpGet"]["path"] = "/readyz"

    played = stage(READY, miswire)
    played.kubelet.await_note("readiness success", 20)
    played.play(**DEGRADED)
    played.kubelet.await_note("killed by liveness", 20)


def test_readiness_at_the_liveness_face_would_send_requests_to_a_server_that_cannot_answer(stage: Play) -> None:
    def miswire(pod: Document) -> None:
        (container,) = pod["spec"]["containers"]
        container["readinessProbe"]["httpGet"]["path"] = "/livez"

    played = stage(READY, miswire)
    played.kubelet.await_note("readiness success", 20)
    played.play(**DEGRADED)
    time.sleep(SEVERAL_PERIODS_S)
    assert played.kubelet.routed
    assert played.happened("readiness failure") == []
