"""The services of the gRPC port that need a model, before there is the first: they say so instead of being absent."""

from __future__ import annotations

from typing import Any

import grpc

from deepseek_tgi.pb import inference_pb2_grpc
from deepseek_tgi.probes.kubernetes import describe
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.router.inference_service import INFERENCE, ServerFacts

FMAAS = "fmaas.GenerationService"
EARLY = frozenset(f"/{INFERENCE}/{name}" for name in ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady"))
"""Calls that can be answered without a model."""


class Handlers:
    """Stands where generated code expects a server, and keeps what it is given."""

    def __init__(self) -> None:
        self.all: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Keep them."""
        self.all += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """The same methods once more."""

    def find(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """What answers a call."""
        return next((found for each in self.all if (found := each.service(details)) is not None), None)


class LateServices(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers for both services from the start; `open` is called once, when the first model serves."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._opened: Handlers | None = None
        self._early = Handlers()
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(ServerFacts(owner), self._early)
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    def open(self, handlers: Handlers) -> None:
        """Let the services themselves answer from now on."""
        self._opened = handlers

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """See `grpc.GenericRpcHandler`."""
        if self._opened is not None:
            return self._opened.find(details)
        if details.method in EARLY:
            return self._early.find(details)
        return self._refusal if details.method.split("/")[1] in {FMAAS, INFERENCE} else None

    async def _refuse(self, requests: Any, context: Any) -> None:
        """In the words of the HTTP door, whatever the call sends."""
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"The server is not ready: {describe(self._owner.current)}")
