"""As much of a kubelet as probes and ends need: runs the one container of a rendered pod as a process.

Restarts and ends are those of Kubernetes (`pkg/kubelet/kuberuntime/kuberuntime_container.go`, `killContainer`), probes
those of `kubelet_prober`. Periods are scaled, so that a test is short; thresholds, orders and everything else are the
pod's. The container's folders are mapped to folders of the test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kubelet_prober import INITIAL, Container, Probe, Result, Worker
from process_guard import TAG

MINIMUM_GRACE_S = 2.0
"""What a process gets after SIGTERM even if the hook before it took all the time."""
SYNC_S = 0.05

OURS = tuple(f"{folder}/" for folder in (sys.prefix, sys.base_prefix, Path(__file__).parent))
"""Where programs of the test itself lie."""


@dataclass(frozen=True)
class Note:
    """Something that happened at `at` (monotonic seconds)."""

    at: float
    what: str


@dataclass
class Kubelet:
    """Keeps the container of one pod from `start` until `delete`; a context manager."""

    pod: Mapping[str, Any]
    folders: Mapping[str, Path]
    period_scale: float
    deleted_route_lag_s: float = 0.5
    """How long the rest of the cluster sends requests to a pod that is leaving."""
    notes: list[Note] = field(default_factory=list)
    container: Container = field(default_factory=Container)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        (self.spec,) = self.pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in self.spec["ports"]}
        self.ports: Mapping[str, int] = ports
        self.environment = self._environment()
        self.workers = {
            kind: Worker(kind, Probe(self.spec[f"{kind}Probe"], ports, self.environment))
            for kind in INITIAL
            if f"{kind}Probe" in self.spec
        }
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._deleted_at: float | None = None
        self._was_ready = False
        self._threads: list[threading.Thread] = []

    def _environment(self) -> dict[str, str]:
        """The image's, the cluster's and the container's own variables; nothing of the test's."""
        own = {entry["name"]: self._mapped(entry["value"]) for entry in self.spec.get("env", [])}
        beside = Path(sys.executable).parent
        cluster = {"HOSTNAME": "deepseek-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_PORT": "tcp://10.0.0.1"}
        return {"PATH": f"{beside}:/usr/local/bin:/usr/bin:/bin", TAG: os.environ.get(TAG, ""), **cluster, **own}

    def _mapped(self, text: str) -> str:
        """`text` with the container's folders where the test has them; what a test runs in their place stays."""
        head, equals, path = text.rpartition("=")
        if path.startswith(OURS):  # an environment and a checkout may lie under /tmp as well
            return text
        for mount, folder in self.folders.items():
            if path == mount or path.startswith(f"{mount}/"):
                return f"{head}{equals}{folder}{path.removeprefix(mount)}"
        return text

    # What the cluster sees.

    @property
    def ready(self) -> bool:
        """The pod's condition."""
        return self.container.running and self.container.started and self._says("readiness", Result.SUCCESS)

    def _says(self, kind: str, result: Result) -> bool:
        """True if that is what the worker of `kind` found of the container that runs now; without one, a success."""
        worker = self.workers.get(kind)
        if worker is None:
            return result is Result.SUCCESS
        return worker.result is result and worker.number == self.container.number

    @property
    def routed(self) -> bool:
        """True while requests are sent here."""
        if self._deleted_at is not None:
            return self._was_ready and time.monotonic() - self._deleted_at < self.deleted_route_lag_s
        return self.ready

    def times(self, what: str) -> list[float]:
        """When it happened."""
        return [note.at for note in self.notes if note.what == what]

    def await_note(self, what: str, timeout_s: float, count: int = 1) -> float:
        """When it happened for the `count`-th time, waiting for it."""
        deadline = time.monotonic() + timeout_s
        while len(self.times(what)) < count:
            assert time.monotonic() < deadline, f"no {what!r} within {timeout_s} s: {self.notes[-20:]}"
            time.sleep(0.01)
        return self.times(what)[count - 1]

    # What it does.

    def __enter__(self) -> Kubelet:
        self._start_container()
        self._threads = [threading.Thread(target=self._sync, daemon=True)]
        self._threads += [
            threading.Thread(target=self._probe, args=(each,), daemon=True) for each in self.workers.values()
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def delete(self) -> int:
        """Take the pod away: hook, SIGTERM, grace period, SIGKILL. The exit code."""
        self._was_ready, self._deleted_at = self.routed, time.monotonic()
        self._is(deleted=True)
        self._note("deleted")
        return self._kill(float(self.pod["spec"].get("terminationGracePeriodSeconds", 30)))

    def _note(self, what: str) -> None:
        self.notes.append(Note(time.monotonic(), what))

    def _start_container(self) -> None:
        argv = [self._mapped(word) for word in [*self.spec["command"], *self.spec.get("args", [])]]
        log = self.folders["/tmp"] / "container.log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                argv, env=self.environment, cwd=self.folders["/tmp"], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._is(number=self.container.number + 1, running=True, started="startup" not in self.workers)
        self._note("container started")

    def _is(self, **facts: Any) -> None:
        """Change what is known of the container, at once: no worker sees a new number beside old facts."""
        with self._lock:
            self.container = replace(self.container, **facts)

    def _has_started(self, number: int) -> None:
        """The container of that `number` has, if it is still that one."""
        with self._lock:
            if self.container.number == number:
                self.container = replace(self.container, started=True)

    def _probe(self, worker: Worker) -> None:
        period_s = worker.probe.number("periodSeconds", 10) * self.period_scale
        self._over.wait(worker.probe.number("initialDelaySeconds", 0) * self.period_scale)
        while not self._over.wait(period_s):
            container = self.container
            before = worker.result if worker.number == container.number else INITIAL[worker.kind]
            going = worker.step(container)
            if worker.result is not before:
                self._note(f"{worker.kind} {worker.result.value}")
                if worker.kind == "startup" and worker.result is Result.SUCCESS:
                    self._has_started(container.number)
            if not going:
                return

    def _sync(self) -> None:
        """Restart what has ended, and what its probes condemn."""
        while not self._over.wait(SYNC_S):
            assert self.process is not None
            if self._deleted_at is not None:
                continue
            kinds = ("startup", "liveness") if self.container.running else ()
            condemned = [kind for kind in kinds if self._says(kind, Result.FAILURE)]
            if condemned:
                self._note(f"killed by {condemned[0]}")
                spec = self.spec[f"{condemned[0]}Probe"]
                grace = spec.get("terminationGracePeriodSeconds", self.pod["spec"]["terminationGracePeriodSeconds"])
                self._kill(float(grace))
            elif self.process.poll() is not None:
                self._ended()
            else:
                continue
            if self._deleted_at is None:
                self._note("restarted")
                self._start_container()

    def _ended(self) -> None:
        self._is(running=False)
        assert self.process is not None
        self._note(f"exited {self.process.returncode}")

    def _kill(self, grace_s: float) -> int:
        assert self.process is not None
        deadline = time.monotonic() + grace_s
        hook = self.spec.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            self._wait_for_end(min(float(hook["sleep"]["seconds"]), grace_s))
        elif "exec" in hook:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(hook["exec"]["command"], env=self.environment, timeout=grace_s, check=False)
        self._note("SIGTERM")
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        if not self._wait_for_end(max(MINIMUM_GRACE_S, deadline - time.monotonic())):
            self._note("SIGKILL")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._ended()
        return self.process.returncode

    def _wait_for_end(self, seconds: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
