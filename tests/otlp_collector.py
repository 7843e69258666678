"""An OTLP/gRPC trace collector that keeps every span it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


class Collector(trace_grpc.TraceServiceServicer):
    """Owner of the received spans."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[Any] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    @classmethod
    def start(cls) -> Collector:
        """Listen on a free port."""
        collector = cls()
        collector._server.start()
        return collector

    def Export(self, request: Any, context: Any) -> Any:
        """The one call of the protocol."""
        with self._arrived:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)
            self._arrived.notify_all()
        return trace_pb.ExportTraceServiceResponse()

    def wait_for(self, wanted: Callable[[Any], bool], timeout_s: float = 20.0) -> Any:
        """The first span that satisfies `wanted`."""
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while True:
                for span in self._spans:
                    if wanted(span):
                        return span
                left = deadline - time.monotonic()
                assert left > 0, f"no such span among {[s.name for s in self._spans]}"
                self._arrived.wait(left)

    def stop(self) -> None:
        """Stop listening."""
        self._server.stop(None)
