"""The router process: from a command line to an open door, and through SIGTERM to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence

import uvloop

from deepseek_tgi.errors import DeepseekTgiError, ResourceError
from deepseek_tgi.probes.grpc_health import Directory
from deepseek_tgi.probes.http_face import ProbePort, asker_of
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event
from deepseek_tgi.router.assembly import assemble
from deepseek_tgi.router.certificates import check_certificates
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig, from_sources
from deepseek_tgi.router.control import ControlClient
from deepseek_tgi.router.door import Door
from deepseek_tgi.router.grpc_port import GrpcPort
from deepseek_tgi.router.listener import bind
from deepseek_tgi.router.model_files import load_model_files
from deepseek_tgi.router.model_state import GRPC_SERVICES
from deepseek_tgi.router.serving import CLOSE_SECONDS, Http, Serving
from deepseek_tgi.router.spans import Spans
from deepseek_tgi.router.startup import introduce
from deepseek_tgi.telemetry import log
from deepseek_tgi.telemetry.streams import open_standard_streams
from deepseek_tgi.telemetry.tracing import set_up

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
AWAIT_POLL_S = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router; the exit code. 0 after SIGTERM or SIGINT, else that of the error."""
    open_standard_streams()  # libuv aborts the process if one of its own gets such a number
    try:
        config = from_sources(sys.argv[1:] if argv is None else argv, os.environ)
        check_certificates(config.grpc_tls_cert, config.grpc_tls_key, config.grpc_client_ca)
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
    owner = Owner()
    owner.apply(Event.LOAD, model=config.model_id, stage="waiting for the shards")
    directory = Directory(owner, *GRPC_SERVICES, config.model_id)
    with contextlib.closing(bind(config.hostname, config.port)) as listener, probe_port(config, owner):
        files = await asyncio.to_thread(load_model_files, config)
        tracing = set_up(config.otlp_endpoint, config.otlp_service_name, _lost)
        door = Door(owner)
        try:
            early = opened_early(door, listener, wanted=config.await_shards > 0)
            async with early as http, grpc_port(config, directory, owner) as port:
                await _shards_up(config)
                spans = Spans(tracing.tracer if config.otlp_endpoint else None)
                shards = await ShardClient.connect(config.master_shard_uds_path, spans)
                try:
                    owner.apply(Event.LOADED)
                    facts = await introduce(shards, config)
                    generation = await ControlClient(shards.channels).published()
                    if generation is None and config.admin_token is not None:
                        logger.warning("these shards cannot change their model: there are no /admin routes")
                    router = assemble(
                        config, shards, facts, files, generation=generation, owner=owner, directory=directory
                    )
                    door.open(router.app)
                    if port is not None:
                        port.open(router)
                    return await Serving(config, owner, router, shards).run(http or Http(door, listener))
                finally:
                    await shards.close()
        finally:
            tracing.shutdown()


@contextlib.asynccontextmanager
async def grpc_port(config: RouterConfig, directory: Directory, owner: Owner) -> AsyncIterator[GrpcPort | None]:
    """The gRPC services, if they are to have a port."""
    if not config.grpc_port:
        yield None
        return
    port = GrpcPort(config, directory, owner)
    await port.start()
    try:
        yield port
    finally:
        directory.close()
        await port.stop(CLOSE_SECONDS)


@contextlib.contextmanager
def probe_port(config: RouterConfig, owner: Owner) -> Iterator[None]:
    """The port of its own for probes, if there is to be one. Raises `ResourceError` if it is taken."""
    if not config.probe_port:
        yield
        return
    try:
        port = ProbePort(asker_of(owner), config.hostname, config.probe_port)
    except OSError as error:
        raise ResourceError(f"--probe-port {config.probe_port}: cannot listen: {error.strerror}") from error
    try:
        yield
    finally:
        port.stop()


@contextlib.asynccontextmanager
async def opened_early(door: Door, listener: socket.socket, wanted: bool) -> AsyncIterator[Http | None]:
    """The HTTP server from now on, where somebody is to be told how far the start is; gone if the start fails."""
    if not wanted:
        yield None
        return
    http = Http(door, listener)
    try:
        yield http
    finally:
        await http.close()


async def _shards_up(config: RouterConfig) -> None:
    """Wait for the sockets of all ranks, if they are still to come."""
    stem = config.master_shard_uds_path.removesuffix("-0")
    while not all(os.path.exists(f"{stem}-{rank}") for rank in range(config.await_shards)):
        await asyncio.sleep(AWAIT_POLL_S)


def _lost(spans: int) -> None:
    logger.debug("%d spans were lost", spans)
