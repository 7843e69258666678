"""What the router knows of one shard: the stream of its states, and how long it has been silent.

A shard that does not know the stream (TGI's own) tells nothing here, and nothing is held against it: its failures are
seen by the generations that fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.pb import control_pb2_grpc
from deepseek_tgi.probes.finding import Finding
from deepseek_tgi.probes.report import report_of
from deepseek_tgi.probes.state import State

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 100
RETRY_S = 0.1
LOST_AFTER = 3
"""Connections refused in a row after which a shard is gone: a socket that nobody listens at belongs to no process."""
SETTLING_S = 0.4
"""A shard passes through states while its model is changed, and its word is heard a little later than its answer."""
UNKNOWN_CODES = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND}


class ShardWatch:
    """Follows one shard. `look` is called by the monitor's thread, the rest on the event loop."""

    def __init__(self, rank: int, channel: grpc.aio.Channel, on_news: Callable[[], None]) -> None:
        self._name = f"shard {rank}"
        self._stub: Any = control_pb2_grpc.ModelControlStub(channel)
        self._on_news = on_news
        self._count = 0
        self._last: tuple[int, State | None, str] = (0, None, "")
        self._seen = 0
        self._heard_at = 0.0
        self._refused = 0
        self._mute = False
        self._state_seen: tuple[State | None, float] = (None, 0.0)

    async def run(self) -> None:
        """Follow until cancelled."""
        while not self._mute:
            try:
                async for increment in self._stub.Watch(pb.WatchRequest(heartbeat_ms=HEARTBEAT_MS)):
                    self._heard(increment)
                self._lost("has left")
            except grpc.aio.AioRpcError as error:
                if error.code() in UNKNOWN_CODES:
                    self._mute = True
                    logger.info("%s does not tell its state; its generations do", self._name)
                    return
                self._lost(error.details() or "", refused=error.code() is grpc.StatusCode.UNAVAILABLE)
            await asyncio.sleep(RETRY_S)

    def start_afresh(self, now: float) -> None:
        """Hold no silence from before `now` against the shard."""
        self._heard_at = now
        self._seen = self._last[0]

    def look(self, now: float) -> Finding:
        """What can be said now. Never waits."""
        count, state, reason = self._last
        if count != self._seen or self._mute:
            self._heard_at = now
        self._seen = count
        silent_s = now - self._heard_at
        if self._refused >= LOST_AFTER and state is not None:
            return Finding(silent_s, silent_s, self._name, dead=f"{self._name} is gone")
        if state is None:
            return Finding(silent_s, silent_s, self._name)
        what = f"{self._name} is {state.value}{': ' + reason if reason else ''}"
        report = report_of(state, started=True)
        if state is not self._state_seen[0]:
            self._state_seen = state, now
        settled = state is State.DEGRADED or now - self._state_seen[1] >= SETTLING_S
        complaint = what if settled and not report.ready else None
        return Finding(silent_s, silent_s, self._name, complaint, None if report.live else what)

    def _heard(self, increment: Any) -> None:
        self._refused = 0
        self._count += 1
        with contextlib.suppress(ValueError):  # a state of a later version says nothing that we know
            before, self._last = self._last, (self._count, State(increment.state), increment.reason)
            if before[1] is not self._last[1]:
                self._on_news()

    def _lost(self, why: str, refused: bool = False) -> None:
        self._refused += refused
        logger.debug("%s: the stream of its state ended: %s", self._name, why)
        if self._refused >= LOST_AFTER:
            self._on_news()
