"""The router process: from a command line to an open door, and through SIGTERM to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop

from deepseek_tgi.errors import DeepseekTgiError, NotReadyError, ResourceError
from deepseek_tgi.router.assembly import Router, assemble
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig, from_sources
from deepseek_tgi.router.model_files import load_model_files
from deepseek_tgi.router.startup import introduce
from deepseek_tgi.telemetry import log

logger = logging.getLogger(__name__)

BACKLOG = 2048
CLOSE_SECONDS = 2.0
"""What streams get to send their last event once they are told to end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router; the exit code. 0 after SIGTERM or SIGINT, else that of the error."""
    try:
        config = from_sources(sys.argv[1:] if argv is None else argv, os.environ)
        log.configure("tracing" if config.json_output else "plain", config.log_level, os.environ)
        return uvloop.run(serve(config))
    except DeepseekTgiError as error:
        sys.stderr.write(f"Error: {error}\n")
        logger.error("%s", error)
        return error.exit_code


async def serve(config: RouterConfig) -> int:
    """Connect, warm up, serve until told to stop."""
    with contextlib.closing(bind(config.hostname, config.port)) as listener:
        files = await asyncio.to_thread(load_model_files, config)
        shards = await ShardClient.connect(config.master_shard_uds_path)
        try:
            facts = await introduce(shards, config)
            router = assemble(config, shards, facts, files)
            return await _run(router, listener, config.graceful_termination_timeout)
        finally:
            await shards.close()


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is told before minutes of warm-up.

    Raises: `ResourceError` naming the address.
    """
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((hostname, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"{hostname}:{port}: cannot listen: {error.strerror}; free the port or choose another with --port"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: `_run` drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to us."""
        yield


async def _run(router: Router, listener: socket.socket, drain_seconds: float) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    server = _Server(
        uvicorn.Config(
            router.app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(CLOSE_SECONDS) + 1,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    batching = asyncio.create_task(router.scheduler.run(), name="batching")
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    logger.info("Connected; serving on %s:%d", *listener.getsockname()[:2])
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({batching, http, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        logger.critical("the %s task ended on its own; leaving", "batching" if batching.done() else "HTTP")
        server.should_exit = True
        await asyncio.wait({http}, timeout=CLOSE_SECONDS)
        for task in (batching, http):
            if task.done():
                task.result()
        return 1
    await _drain(router, drain_seconds)
    server.should_exit = True
    await http
    batching.cancel()
    await asyncio.wait({batching})
    router.close()
    logger.info("Stopped")
    return 0


async def _drain(router: Router, seconds: float) -> None:
    """Refuse new work and let what runs finish; what is left after `seconds` ends with an error event."""
    traffic = router.state.traffic
    traffic.draining = True
    logger.info("Stopping: %d requests are running, they have %g s", traffic.active, seconds)
    if await traffic.idle_within(seconds):
        return
    logger.warning("%d requests are cut off", traffic.active)
    router.scheduler.end_all(NotReadyError("The server is shutting down"))
    await traffic.idle_within(CLOSE_SECONDS)
