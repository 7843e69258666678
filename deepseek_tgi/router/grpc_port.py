"""The gRPC port: text generation for TGIS clients, the Open Inference Protocol, health and reflection, over TCP.

Off unless a port is given. Plain without a certificate; with one, TLS; with a client CA too, only clients whose
certificate it signed are let in.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from deepseek_tgi.errors import ResourceError
from deepseek_tgi.pb import fmaas_pb2_grpc, inference_pb2_grpc
from deepseek_tgi.probes.grpc_health import Directory, add_health
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.router.assembly import Router
from deepseek_tgi.router.certificates import Certificates, read
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.fmaas_service import FmaasService
from deepseek_tgi.router.grpc_calls import Calls, Doorkeeper
from deepseek_tgi.router.inference_service import INFERENCE, InferenceService
from deepseek_tgi.router.late_services import FMAAS, Handlers, LateServices

logger = logging.getLogger(__name__)

KEEPALIVE_MS = 60_000
KEEPALIVE_ANSWER_MS = 20_000
MIN_PING_INTERVAL_MS = 5_000
MAX_STREAMS_A_CONNECTION = 1000


class GrpcPort:
    """The server behind the port; made and used on the event loop. Health is told from the start, as on HTTP."""

    def __init__(self, config: RouterConfig, directory: Directory, owner: Owner) -> None:
        """Bind. Raises `ConfigError` for certificates that do not fit, `ResourceError` for a port that is taken."""
        credentials = credentials_of(config)
        self._config = config
        self._late = LateServices(owner)
        self._server = grpc.aio.server(options=options_of(config), maximum_concurrent_rpcs=None)
        self._server.add_generic_rpc_handlers((self._late,))
        names = [FMAAS, INFERENCE, add_health(directory, self._server), reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        host = f"[{config.hostname}]" if ":" in config.hostname else config.hostname
        address = f"{host}:{config.grpc_port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ResourceError(f"gRPC: {address}: cannot listen; free the port or choose another") from error

    def open(self, router: Router) -> None:
        """Let the services that need a model answer from now on."""
        state, handlers = router.state, Handlers()
        calls = Calls(Doorkeeper.of(self._config), state.traffic, state.spans, state.infer)
        fmaas_pb2_grpc.add_GenerationServiceServicer_to_server(FmaasService(calls, router.models), handlers)
        service = InferenceService(calls, router.models, router.changes, router.owner)
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, handlers)
        self._late.open(handlers)

    async def start(self) -> None:
        """Take calls."""
        await self._server.start()
        logger.info("gRPC on port %d", self.port)

    async def stop(self, seconds: float) -> None:
        """Take no calls any more, and let those that run end within `seconds`."""
        await self._server.stop(seconds)


def options_of(config: RouterConfig) -> list[tuple[str, Any]]:
    """Message limits, keepalive, and one process a port."""
    return [
        ("grpc.max_receive_message_length", config.grpc_max_message),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS_A_CONNECTION),
        ("grpc.so_reuseport", 0),
    ]


def credentials_of(config: RouterConfig) -> grpc.ServerCredentials | None:
    """What the options say of certificates; None: none are used. Raises `ConfigError`."""
    given = Certificates.of(config.grpc_tls_cert, config.grpc_tls_key, config.grpc_client_ca)
    if given is None:
        return None
    given.check()
    return grpc.ssl_server_credentials(
        [(read(given.key), read(given.certificate))],
        root_certificates=None if given.authority is None else read(given.authority),
        require_client_auth=given.authority is not None,
    )
