"""The router process: from a command line to an open door, and through SIGTERM to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence

import uvloop

from deepseek_tgi.errors import DeepseekTgiError, NotReadyError
from deepseek_tgi.router.assembly import Router, assemble
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig, from_sources
from deepseek_tgi.router.control import ControlClient
from deepseek_tgi.router.grpc_port import GrpcPort
from deepseek_tgi.router.listener import bind, server_for
from deepseek_tgi.router.model_files import load_model_files
from deepseek_tgi.router.spans import Spans
from deepseek_tgi.router.startup import introduce
from deepseek_tgi.telemetry import log
from deepseek_tgi.telemetry.streams import open_standard_streams
from deepseek_tgi.telemetry.tracing import set_up

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_SECONDS = 2.0
"""What streams get to send their last event once they are told to end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router; the exit code. 0 after SIGTERM or SIGINT, else that of the error."""
    open_standard_streams()  # libuv aborts the process if one of its own gets such a number
    try:
        config = from_sources(sys.argv[1:] if argv is None else argv, os.environ)
        log.configure("tracing" if config.json_output else "plain", config.log_level, os.environ)
        return uvloop.run(serve(config))
    except asyncio.CancelledError:
        logger.info("Stopped before it was ready")
        return 0
    except DeepseekTgiError as error:
        sys.stderr.write(f"Error: {error}\n")
        logger.error("%s", error)
        return error.exit_code


async def serve(config: RouterConfig) -> int:
    """Connect, warm up, serve until told to stop."""
    starting = asyncio.current_task()
    assert starting is not None
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, starting.cancel)
    with contextlib.closing(bind(config.hostname, config.port)) as listener:
        files = await asyncio.to_thread(load_model_files, config)
        tracing = set_up(config.otlp_endpoint, config.otlp_service_name, _lost)
        spans = Spans(tracing.tracer if config.otlp_endpoint else None)
        shards = await ShardClient.connect(config.master_shard_uds_path, spans)
        try:
            facts = await introduce(shards, config)
            generation = await ControlClient(shards.channels).published()
            if generation is None and config.admin_token is not None:
                logger.warning("these shards cannot change their model: there are no /admin routes")
            router = assemble(config, shards, facts, files, generation)
            async with grpc_port(config, router):
                return await _run(router, listener, config.graceful_termination_timeout)
        finally:
            await shards.close()
            tracing.shutdown()


@contextlib.asynccontextmanager
async def grpc_port(config: RouterConfig, router: Router) -> AsyncIterator[None]:
    """The gRPC services, if they are to have a port."""
    if not config.grpc_port:
        yield
        return
    port = GrpcPort(config, router)
    await port.start()
    try:
        yield
    finally:
        await port.stop(CLOSE_SECONDS)


def _lost(spans: int) -> None:
    logger.debug("%d spans were lost", spans)


async def _run(router: Router, listener: socket.socket, drain_seconds: float) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    server = server_for(router.app)
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    batching = asyncio.create_task(router.models.run(), name="batching")
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
    # A launcher kills at the end of this time: what is cut off must have been told before.
    await _drain(router, max(0.0, drain_seconds - 2 * CLOSE_SECONDS))
    server.should_exit = True
    await http
    if router.changes is not None:
        await router.changes.close()
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
    router.models.end_all(NotReadyError("The server is shutting down"))
    await traffic.idle_within(CLOSE_SECONDS)
