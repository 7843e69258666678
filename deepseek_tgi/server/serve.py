"""The life of a shard process: load, bind, show the socket, serve, finish, leave.

Choice: the event loop runs from the first moment and the engine's thread does the loading. Prevents: a SIGTERM or a
dead launcher going unnoticed during minutes of loading. Rejected: loading first, as TGI does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deepseek_tgi.config import ShardConfig
from deepseek_tgi.errors import ConfigError, ResourceError
from deepseek_tgi.pb import control_pb2_grpc, generate_pb2_grpc
from deepseek_tgi.probes.grpc_health import Directory, HealthService
from deepseek_tgi.probes.http_face import ProbePort, asker_of
from deepseek_tgi.probes.monitor import MonitorLimits
from deepseek_tgi.probes.owner import Increment, Owner, Snapshot
from deepseek_tgi.probes.publishing import Follower, trace_change
from deepseek_tgi.probes.state import Event, State
from deepseek_tgi.server.control import CONTROL, ControlService
from deepseek_tgi.server.engine_api import EngineApi
from deepseek_tgi.server.engine_thread import EngineThread
from deepseek_tgi.server.evidence import StepEvidence, monitor_of
from deepseek_tgi.server.interceptors import CallInterceptor
from deepseek_tgi.server.lifeline import StopRequest, watch_signals, watch_stdin
from deepseek_tgi.server.loader import Load, Recipe
from deepseek_tgi.server.loading import load_engine, model_of
from deepseek_tgi.server.models import Models, Source
from deepseek_tgi.server.service import SERVICE, ShardService, first_model
from deepseek_tgi.server.sockets import Publication, check_path, rank_path
from deepseek_tgi.server.watch import WatchCalls
from deepseek_tgi.telemetry import tracing
from deepseek_tgi.telemetry.metrics import ShardMetrics

logger = logging.getLogger(__name__)

HURRIED_STOP_S = 4.0
"""Time for a running call when the launcher is gone: nobody will read its answer."""

ABANDONED_S = 1.0
"""Requests that nobody brings on for this long have lost their router."""
DRAIN_POLL_S = 0.02

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.max_send_message_length", -1),
)


def serve(config: ShardConfig, load: Load = load_engine) -> int:
    """Serve `config` until asked to leave; the process's exit code. Raises the taxonomy's errors if it cannot start."""
    return asyncio.run(Shard(config, load).run())


class Shard:
    """Owns the parts of one shard process and the order of its life."""

    def __init__(self, config: ShardConfig, load: Load) -> None:
        self._config = config
        self._load = load
        self._path = rank_path(config.uds_path, config.rank)
        self._thread = EngineThread()
        self._metrics = ShardMetrics()
        self._state = Owner()
        self._directory = Directory(self._state, SERVICE)
        self._publication: Publication | None = None

    async def run(self) -> int:
        """The whole life; returns the exit code."""
        self._stop = StopRequest()
        watch_signals(self._stop, self._leave_at_once)
        watch_stdin(self._stop)
        check_path(self._path)
        self._tracing = tracing.set_up(
            self._config.otlp_endpoint, self._config.otlp_service_name, self._metrics.spans_dropped.inc
        )
        follower = Follower(self._state, self._show, self._changed)
        if self._config.metrics_port:
            self._serve_metrics(self._config.metrics_port + self._config.rank)
        probes = self._probe_port()
        try:
            engine = await self._loaded()
            if engine is not None:
                serving, engine = self._serve(engine), None
                await serving
        except BaseException as error:
            self._state.apply(Event.FAIL, reason=str(error) or type(error).__name__)
            raise
        finally:
            self._state.apply(Event.STOPPED)
            follower.close()
            if probes is not None:
                probes.stop()
            self._thread.close()
            self._tracing.shutdown()
        return self._stop.exit_code

    async def _loaded(self) -> EngineApi | None:
        """The engine; None if asked to leave meanwhile (the loading thread is left behind)."""
        self._state.apply(Event.LOAD, model=self._config.model_id)
        loading = asyncio.ensure_future(self._thread.run(self._loads))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            loading.cancel()
            self._state.apply(Event.STOP)
            return None
        stopping.cancel()
        return loading.result()

    def _loads(self) -> EngineApi:
        return self._load(self._config, self._metrics.count_event, self._progress)

    def _progress(self, percent: float) -> None:
        self._state.apply(Event.PROGRESS, stage="loading", percent=percent)

    async def _serve(self, engine: EngineApi) -> None:
        source = Source(model_of(self._config), self._config.revision)
        models = first_model(engine, self._thread, source, self._config.world_size)
        del engine  # it is the models' from here on: one that is unloaded must go
        service = self._service(models)
        server = self._server(service, models)
        self._publication = publication = Publication(self._path)
        try:
            server.add_insecure_port(f"unix:{publication.bound_path}")
        except RuntimeError as error:
            raise ResourceError(f"cannot bind {publication.bound_path}: {error}") from error
        monitor = monitor_of(self._state, self._thread, service, MonitorLimits(self._config.stall_limit))
        service.evidence = StepEvidence(monitor)
        try:
            await server.start()
            monitor.start()
            publication.show()
            self._state.apply(Event.LOADED)
            logger.info("rank %d listens on %s", self._config.rank, self._path)
            await self._stop.wait()
        finally:
            self._state.apply(Event.STOP)
            monitor.stop()
            allowed_s = HURRIED_STOP_S if self._stop.hurried else self._config.stop_timeout
            started = time.monotonic()
            await self._running_ends(service, allowed_s)
            self._directory.close()
            await server.stop(max(0.0, allowed_s - (time.monotonic() - started)))
            publication.hide()
            for held in models.all():
                if self._thread.idle and held.engine is not None:
                    await self._thread.run(held.engine.close)

    async def _running_ends(self, service: ShardService, allowed_s: float) -> None:
        """While a router still brings running requests on, their steps are served; new ones are refused."""
        deadline = time.monotonic() + allowed_s
        while service.holds_requests and self._state.current.report.runs and time.monotonic() < deadline:
            if self._thread.idle and time.monotonic() - self._thread.progress.last.at > ABANDONED_S:
                return
            await asyncio.sleep(DRAIN_POLL_S)

    def _probe_port(self) -> ProbePort | None:
        port = self._config.shard_probe_port
        if not port:
            return None
        try:
            return ProbePort(asker_of(self._state), "0.0.0.0", port + self._config.rank)
        except OSError as error:
            taken = f"port {port + self._config.rank} cannot be bound ({error.strerror}); choose another"
            raise ResourceError(f"DEEPSEEK_TGI_SHARD_PROBE_PORT: {taken}") from error

    def _service(self, models: Models) -> ShardService:
        config = self._config
        urls = [f"unix://{rank_path(config.uds_path, rank)}" for rank in range(config.world_size)]
        return ShardService(models, self._thread, self._state, urls, self._metrics)

    def _server(self, service: ShardService, models: Models) -> grpc.aio.Server:
        interceptor = CallInterceptor(SERVICE, service.drop, self._fatal, self._tracing, self._metrics)
        server = grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
        generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(service, server)
        watch = WatchCalls(self._state, self._directory, self._thread.progress)
        recipe = Recipe(self._config, self._load, self._metrics.count_event)
        control = ControlService(recipe, models, service, self._state, watch)
        control_pb2_grpc.add_ModelControlServicer_to_server(control, server)
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(self._directory), server)
        reflection.enable_server_reflection((SERVICE, CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _leave_at_once(self, number: int) -> None:
        """A second signal: whatever runs is cut off."""
        logger.warning("got another signal: leaving at once")
        if self._publication is not None:
            self._publication.hide()
        os._exit(128 + number)

    def _fatal(self, error: BaseException) -> None:
        self._state.apply(Event.FAIL, reason=str(error))
        self._stop.ask(f"the device failed: {error}", exit_code=1)

    def _show(self, snapshot: Snapshot) -> None:
        for each in State:
            self._metrics.state.labels(each.value).set(each is snapshot.state)

    def _changed(self, increment: Increment) -> None:
        """Publish a change: gauge, counter and trace."""
        before, after = increment.before, increment.after
        if after.state is before:
            return
        self._show(after)
        self._metrics.state_transitions.labels(before.value, after.state.value).inc()
        trace_change(self._tracing.tracer, increment)
        if after.state is State.FAILED:
            self._stop.ask(f"the shard failed: {after.facts.reason}", exit_code=1, hurried=True)

    def _serve_metrics(self, port: int) -> None:
        try:
            self._metrics.serve(port)
        except OSError as error:
            raise ResourceError(
                f"DEEPSEEK_TGI_METRICS_PORT: port {port} cannot be bound ({error.strerror}); choose another"
            ) from error


def check(config: ShardConfig) -> None:
    """Raise `ConfigError` for a config that cannot be served, before anything is imported or loaded."""
    if not config.model_id:
        raise ConfigError("serve: no model; expected `serve MODEL_ID`, a hub id or a folder")
    if config.rank >= config.world_size:
        raise ConfigError(
            f"RANK {config.rank} with WORLD_SIZE {config.world_size}: expected a rank below the world size"
        )
