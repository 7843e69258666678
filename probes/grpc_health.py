"""`grpc.health.v1` as a view of owners: what Check, Watch and List say is read from the same snapshot as every face.

Choice: a servicer of our own. Prevents: a second copy of the state that is set later, or not at all once the event loop
has other work. Rejected: grpc's HealthServicer, which keeps statuses that somebody must set.
"""

# ruff: noqa: N802 - the methods carry the wire's names

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deepseek_tgi.probes.owner import Owner, Subscription

Status = int
"""A number of the enum `HealthCheckResponse.ServingStatus`."""
SERVING: Status = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Status = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN: Status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

MAX_LISTED = 100
"""More services than this are not listed (RESOURCE_EXHAUSTED), as the protocol asks."""


class Directory:
    """Which owner stands behind which service name; owned by the event loop's thread. `""` is the whole server."""

    def __init__(self, server: Owner, *names: str) -> None:
        self._owners: dict[str, Owner] = {"": server, **dict.fromkeys(names, server)}
        self._watchers: set[Callable[[], None]] = set()
        self.closed = False

    def put(self, name: str, owner: Owner) -> None:
        """Show `owner` under `name`, in place of whoever was there."""
        self._owners[name] = owner
        self._tell()

    def remove(self, name: str) -> None:
        """Show nobody under `name`; absent is fine."""
        if self._owners.pop(name, None) is not None:
            self._tell()

    def close(self) -> None:
        """Let every watch end once it has told what it knows: an endless call would hold up the server's own end."""
        self.closed = True
        self._tell()

    def get(self, name: str) -> Owner | None:
        """The owner behind `name`."""
        return self._owners.get(name)

    def names(self) -> list[str]:
        """All names."""
        return sorted(self._owners)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` whenever a name comes, goes or changes hands; what is returned ends that."""
        self._watchers.add(changed)
        return lambda: self._watchers.discard(changed)

    def _tell(self) -> None:
        for changed in tuple(self._watchers):
            changed()


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Check, Watch and List over a directory; never waits on anything but a change."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def Check(self, request: Any, context: Any) -> Any:
        """The status now; NOT_FOUND for a name nobody stands behind."""
        owner = self._directory.get(request.service)
        if owner is None:
            known = ", ".join(repr(name) for name in self._directory.names())
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service!r} is unknown; known: {known}")
        return health_pb2.HealthCheckResponse(status=_status(owner))

    async def List(self, request: Any, context: Any) -> Any:
        """The status of every name."""
        names = self._directory.names()
        if len(names) > MAX_LISTED:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{len(names)} services; {MAX_LISTED} are listed")
        statuses = {name: health_pb2.HealthCheckResponse(status=_status(self._directory.get(name))) for name in names}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The status now and whenever it changes; SERVICE_UNKNOWN while nobody stands behind the name."""
        name, changed, loop = request.service, asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        leave = self._directory.watch(changed.set)
        subscription: Subscription | None = None
        owner: Owner | None = None
        last = None
        try:
            while True:
                changed.clear()
                if self._directory.get(name) is not owner:
                    owner = self._directory.get(name)
                    if subscription is not None:
                        subscription.close()
                    subscription = None if owner is None else owner.subscribe(wake)
                for status in _passed(owner, subscription):
                    if status != last:
                        last = status
                        yield health_pb2.HealthCheckResponse(status=status)
                if self._directory.closed:
                    return
                await changed.wait()
        finally:
            leave()
            if subscription is not None:
                subscription.close()


def _status(owner: Owner | None) -> Status:
    if owner is None:
        return UNKNOWN
    return _serving(owner.current.report.ready)


def _serving(ready: bool) -> Status:
    return SERVING if ready else NOT_SERVING


def _passed(owner: Owner | None, subscription: Subscription | None) -> list[Status]:
    """Every status since the last look, in order: a short fall of readiness is told too."""
    if owner is None or subscription is None:
        return [UNKNOWN]
    missed = subscription.take()
    shots = ([] if missed.snapshot is None else [missed.snapshot]) + [each.after for each in missed.increments]
    return [_serving(shot.report.ready) for shot in shots]


def add_health(directory: Directory, server: grpc.aio.Server) -> str:
    """Let `server` answer for a directory; the service's full name."""
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(directory), server)
    name: str = health.SERVICE_NAME
    return name
