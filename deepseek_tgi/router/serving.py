"""The router while it serves, and its end: by a signal, or because something broke."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket

from deepseek_tgi.errors import NotReadyError
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State
from deepseek_tgi.router.assembly import Router
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.door import Door
from deepseek_tgi.router.health import RouterHealth, StatePublisher
from deepseek_tgi.router.listener import server_for

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_SECONDS = 2.0
"""What streams get to send their last event once they are told to end."""
LINGER_S = 5.0
"""A router that has failed tells so for this long before it leaves, unless its launcher ends it first."""
ECHO_S = 0.2
"""A signal again this soon is one request heard twice: `timeout` signals its child and then its own group."""


class Http:
    """The HTTP server of a door, running from the start."""

    def __init__(self, door: Door, listener: socket.socket) -> None:
        self._server = server_for(door)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")

    async def close(self, timeout: float | None = None) -> None:
        """End the server; at most `timeout` seconds are waited for it."""
        self._server.should_exit = True
        await asyncio.wait({self.task}, timeout=timeout)


class Serving:
    """One life of an assembled router; `run` is all of it."""

    def __init__(self, config: RouterConfig, owner: Owner, router: Router, shards: ShardClient) -> None:
        self._config = config
        self._owner = owner
        self._router = router
        self._publisher = StatePublisher(owner, router.state.metrics, router.state.spans)
        self._health = RouterHealth(owner, shards, router.state.liveness, config.stall_limit)
        self._stop = asyncio.Event()
        self._asked_at: float | None = None

    async def run(self, http: Http) -> int:
        """Serve until told to stop or until something breaks; the exit code."""
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._note, number)
        batching = asyncio.create_task(self._router.models.run(), name="batching")
        self._owner.apply(Event.WARMED)
        self._health.start()
        logger.info("Connected; serving on %s:%d", *http.address)
        waits = [asyncio.create_task(event.wait()) for event in (self._stop, self._publisher.failed)]
        try:
            await asyncio.wait({batching, http.task, *waits}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return await self._end_well(http, batching)
            return await self._end_badly(http, batching)
        finally:
            for wait in waits:
                wait.cancel()
            await self._health.stop()
            self._owner.apply(Event.STOPPED)
            self._publisher.close()

    def _note(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if self._asked_at is not None and now - self._asked_at >= ECHO_S:
            logger.warning("got another signal: leaving at once")
            os._exit(128 + number)
        self._asked_at = now
        self._stop.set()

    async def _end_well(self, http: Http, batching: asyncio.Task[None]) -> int:
        self._owner.apply(Event.STOP)
        if self._config.shutdown_delay:
            logger.info("Stopping: new requests are taken for another %g s", self._config.shutdown_delay)
            await asyncio.sleep(self._config.shutdown_delay)
        # A launcher kills at the end of this time: what is cut off must have been told before.
        await self._drain(max(0.0, self._config.graceful_termination_timeout - 2 * CLOSE_SECONDS))
        await http.close()
        if self._router.changes is not None:
            await self._router.changes.close()
        batching.cancel()
        await asyncio.wait({batching})
        self._router.close()
        logger.info("Stopped")
        return 0

    async def _drain(self, seconds: float) -> None:
        """Refuse new work and let what runs finish; what is left after `seconds` ends with an error event."""
        traffic = self._router.state.traffic
        traffic.draining = True
        logger.info("Stopping: %d requests are running, they have %g s", traffic.active, seconds)
        if await traffic.idle_within(seconds):
            return
        logger.warning("%d requests are cut off", traffic.active)
        self._router.models.end_all(NotReadyError("The server is shutting down"))
        await traffic.idle_within(CLOSE_SECONDS)

    async def _end_badly(self, http: Http, batching: asyncio.Task[None]) -> int:
        if self._owner.state is State.FAILED:
            reason = self._owner.current.facts.reason or "unknown"
            logger.critical("the router has failed: %s; leaving", reason)
            self._router.state.traffic.draining = True
            self._router.models.end_all(NotReadyError(f"The server has failed: {reason}"))
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LINGER_S)
        else:
            logger.critical("the %s task ended on its own; leaving", "batching" if batching.done() else "HTTP")
        await http.close(CLOSE_SECONDS)
        for task in (batching, http.task):
            if task.done() and not task.cancelled():
                task.result()
        return 1
