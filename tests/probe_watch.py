"""A prober as a kubelet is one, but faster: asks each probe of a port all the time and notes every change of answer."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass

FACES = ("livez", "readyz", "startupz")
PERIOD_S = 0.02
TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Change:
    """At `at` (monotonic seconds) the answer to `face` became `status`; 0 is no answer."""

    at: float
    face: str
    status: int
    text: str = ""


class ProbeWatch:
    """Asks from a thread of its own until `stop`; a context manager."""

    def __init__(self, port: int, faces: tuple[str, ...] = FACES) -> None:
        self._port = port
        self._faces = faces
        self._stopped = threading.Event()
        self.changes: list[Change] = []
        self.latencies_s: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ProbeWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10)

    def status(self, face: str) -> int | None:
        """The latest answer."""
        return next((change.status for change in reversed(self.changes) if change.face == face), None)

    def wait(self, face: str, status: int, timeout_s: float) -> Change:
        """The latest change of `face`, once it is one to `status`."""
        return self._wait(face, {status}, timeout_s)

    def wait_for_no(self, face: str, timeout_s: float) -> Change:
        """The latest change of `face`, once it is one to 503 or to no answer at all."""
        return self._wait(face, {503, 0}, timeout_s)

    def _wait(self, face: str, statuses: set[int], timeout_s: float) -> Change:
        deadline = time.monotonic() + timeout_s
        while self.status(face) not in statuses:
            assert time.monotonic() < deadline, f"{face} is not {statuses} after {timeout_s} s: {self.changes}"
            time.sleep(0.005)
        return next(change for change in reversed(self.changes) if change.face == face)

    def seen(self, face: str) -> list[int]:
        """All answers of `face`, repetitions left out."""
        return [change.status for change in self.changes if change.face == face]

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            for face in self._faces:
                status, text = self._ask(face)
                if status != self.status(face):
                    self.changes.append(Change(time.monotonic(), face, status, text))

    def _ask(self, face: str) -> tuple[int, str]:
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", f"/{face}")
            answer = connection.getresponse()
            found = answer.status, answer.read().decode()
            self.latencies_s.append(time.monotonic() - started)
            return found
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()
