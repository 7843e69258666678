"""`ModelControl.Watch`: the shard's state for whoever stands in front of it, with a heartbeat that its absence tells.

The event loop sends the heartbeats: a process that is stopped or hangs sends none, whatever it said last.
"""

# ruff: noqa: N802 - the methods carry the wire's names

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.pb import control_pb2_grpc
from deepseek_tgi.probes.grpc_health import Directory
from deepseek_tgi.probes.owner import Owner, Snapshot
from deepseek_tgi.probes.progress import Progress

HEARTBEAT_MS = 250
MIN_HEARTBEAT_MS = 20


class WatchCalls(control_pb2_grpc.ModelControlServicer):
    """Serves Watch to our own router, which is the only one that knows it; `followers` counts who listens now."""

    def __init__(self, state: Owner, directory: Directory, progress: Progress) -> None:
        self._watched = state
        self._directory = directory
        self._progress = progress
        self.followers = 0

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """A snapshot or what was missed, then every change in order, and heartbeats between them."""
        period_s = max(MIN_HEARTBEAT_MS, request.heartbeat_ms or HEARTBEAT_MS) / 1000
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        leave = self._directory.watch(changed.set)
        subscription = self._watched.subscribe(wake, request.from_seq - 1 if request.from_seq else None)
        self.followers += 1
        try:
            while True:
                changed.clear()
                missed = subscription.take()
                if missed.snapshot is not None:
                    yield self._message(pb.Increment.SNAPSHOT, missed.snapshot)
                for increment in missed.increments:
                    yield self._message(pb.Increment.CHANGE, increment.after, increment.event.value)
                if self._directory.closed:
                    return
                try:
                    await asyncio.wait_for(changed.wait(), period_s)
                except (asyncio.TimeoutError, TimeoutError):
                    yield self._message(pb.Increment.HEARTBEAT, self._watched.current)
        finally:
            self.followers -= 1
            leave()
            subscription.close()

    def _message(self, kind: Any, snapshot: Snapshot, event: str = "") -> Any:
        facts, last, now = snapshot.facts, self._progress.last, time.monotonic()
        return pb.Increment(
            kind=kind,
            seq=snapshot.seq,
            state=snapshot.state.value,
            age_ms=max(0, int((now - snapshot.since) * 1000)),
            stage=facts.stage or "",
            percent=facts.percent or 0.0,
            model_id=facts.model or "",
            generation=facts.generation or 0,
            reason=facts.reason or "",
            event=event,
            progress_age_ms=max(0, int((now - last.at) * 1000)),
            busy=bool(last.call),
        )
