"""A kubelet's view of one probe: how it asks, and when a run of answers counts.

Source: Kubernetes, `pkg/kubelet/prober/worker.go` (`doProbe`) and `pkg/probe/{http,exec,grpc}`.
"""

from __future__ import annotations

import http.client
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Result(Enum):
    """What a probe, or the run of its answers, says."""

    SUCCESS = "success"
    FAILURE = "failure"
    UNKNOWN = "unknown"


INITIAL = {"startup": Result.UNKNOWN, "readiness": Result.FAILURE, "liveness": Result.SUCCESS}


@dataclass(frozen=True)
class Probe:
    """One probe of a container's spec, with Kubernetes' defaults."""

    spec: Mapping[str, Any]
    ports: Mapping[str, int]
    environment: Mapping[str, str]

    def number(self, name: str, default: int) -> int:
        """A field."""
        return int(self.spec.get(name, default))

    def ask(self) -> Result | None:
        """Ask once; None if the question could not be put."""
        timeout_s = float(self.number("timeoutSeconds", 1))
        if "httpGet" in self.spec:
            return self._get(self.spec["httpGet"], timeout_s)
        if "exec" in self.spec:
            return self._run(self.spec["exec"]["command"], timeout_s)
        return self._health(self.spec["grpc"], timeout_s)

    def _get(self, action: Mapping[str, Any], timeout_s: float) -> Result:
        port = action["port"] if isinstance(action["port"], int) else self.ports[action["port"]]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        headers = {"User-Agent": "kube-probe/1.37", "Accept": "*/*", "Connection": "close"}
        try:
            connection.request("GET", action.get("path", "/"), headers=headers)
            return Result.SUCCESS if 200 <= connection.getresponse().status < 400 else Result.FAILURE
        except (OSError, http.client.HTTPException):
            return Result.FAILURE
        finally:
            connection.close()

    def _run(self, command: list[str], timeout_s: float) -> Result | None:
        try:
            done = subprocess.run(
                command, env=dict(self.environment), timeout=timeout_s, capture_output=True, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result.FAILURE
        except OSError:
            return None
        return Result.SUCCESS if done.returncode == 0 else Result.FAILURE

    def _health(self, action: Mapping[str, Any], timeout_s: float) -> Result:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(f"127.0.0.1:{action['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=action.get("service") or "")
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
            except grpc.RpcError:
                return Result.FAILURE
        return Result.SUCCESS if answer.status == health_pb2.HealthCheckResponse.SERVING else Result.FAILURE


@dataclass(frozen=True)
class Container:
    """What a worker may know of the container it asks at one instant: `number` tells one start from the next."""

    number: int = 0
    running: bool = False
    deleted: bool = False
    started: bool = False


class Worker:
    """One probe's run of answers about the container of that `number`; `step` is kubelet's doProbe, one look."""

    def __init__(self, kind: str, probe: Probe) -> None:
        self.kind = kind
        self.probe = probe
        self.result = INITIAL[kind]
        self.number = 0
        self._on_hold = False
        self._last: Result | None = None
        self._run = 0

    def step(self, container: Container, ask: Callable[[], Result | None] | None = None) -> bool:
        """Look once; false when there is nothing to look at any more."""
        if container.number == 0:
            return True
        if container.number != self.number:
            self.number, self.result, self._on_hold = container.number, INITIAL[self.kind], False
        if self._on_hold:
            return True
        if not container.running:
            self.result = Result.FAILURE
            return True
        if container.deleted and self.kind != "readiness":
            self.result = Result.SUCCESS
            return False
        if container.started == (self.kind == "startup"):
            return True
        self._note((ask or self.probe.ask)())
        return True

    def _note(self, answer: Result | None) -> None:
        if answer is None:
            return
        self._run = self._run + 1 if answer is self._last else 1
        self._last = answer
        threshold = ("failureThreshold", 3) if answer is Result.FAILURE else ("successThreshold", 1)
        if self._run < self.probe.number(*threshold):
            return
        self.result = answer
        if self.kind == "startup" or (self.kind == "liveness" and answer is Result.FAILURE):
            self._on_hold, self._run = True, 0
