"""Around every call: a span, a clock, and the one place where an error becomes a gRPC status."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from deepseek_tgi.errors import DeepseekTgiError, RequestError
from deepseek_tgi.server.convert import named_batches
from deepseek_tgi.server.models import GENERATION_KEY, generation_of
from deepseek_tgi.telemetry.metrics import ShardMetrics
from deepseek_tgi.telemetry.tracing import Tracing, parent_of

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 6000
"""A status message travels percent-encoded in the trailers, which clients limit to 8 KiB together."""
STATUS_ATTRIBUTE = "rpc.grpc.status_code"

Drop = Callable[[Sequence[int], "int | None"], Awaitable[None]]
"""Of batches, and the generation that the call named."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Status code and readable message of any error; what is not ours is INTERNAL with its type's name."""
    if isinstance(error, DeepseekTgiError):
        code, message = grpc.StatusCode[error.grpc_code], str(error) or type(error).__name__
    else:
        code, message = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
    return code, _fitting(message)


def _fitting(message: str) -> str:
    """`message` cut to what the trailers hold, and without halves of surrogate pairs, which no status can carry."""
    message = message[:MAX_MESSAGE_BYTES].encode(errors="replace").decode()
    # Printable ASCII but % travels as it is, any other byte as three.
    sizes = accumulate(1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode()) for c in message)
    kept = sum(size <= MAX_MESSAGE_BYTES for size in sizes)
    return message if kept == len(message) < MAX_MESSAGE_BYTES else message[:kept] + " … (cut)"


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Maps errors of our service's calls; other services on the port (health, reflection) pass untouched.

    A call that fails, or whose client went away, loses the batches it named (`drop`): the router counts them as gone.
    `on_fatal` is told of an error after which the process must leave.
    """

    def __init__(
        self,
        service: str,
        drop: Drop,
        on_fatal: Callable[[BaseException], None],
        tracing: Tracing,
        metrics: ShardMetrics,
    ) -> None:
        self._prefix = f"/{service}/"
        self._drop = drop
        self._on_fatal = on_fatal
        self._tracing = tracing
        self._metrics = metrics

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wrap the handler of one of our calls."""
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None or not details.method.startswith(self._prefix):
            return handler
        metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}

        async def call(request: Any, context: Any) -> Any:
            started = time.perf_counter()
            method = details.method.rpartition("/")[2]
            try:
                with self._span(details.method, metadata) as span:
                    try:
                        return await handler.unary_unary(request, context)
                    except Exception as error:
                        span.set_attribute(STATUS_ATTRIBUTE, status_of(error)[0].value[0])
                        raise
            except asyncio.CancelledError:
                await asyncio.shield(self._drop(named_batches(request), _generation(metadata)))
                raise
            except Exception as error:  # noqa: BLE001 - the mapper: every error becomes a status here
                code, message = await self._failed(method, request, error, _generation(metadata))
            finally:
                self._metrics.rpc_duration.labels(method).observe(time.perf_counter() - started)
            return await context.abort(code, message)

        return grpc.unary_unary_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)

    def _span(self, method: str, metadata: dict[str, str]) -> Any:
        """A SERVER span named by the method path, child of the caller's."""
        service, _, name = method.removeprefix("/").rpartition("/")
        return self._tracing.tracer.start_as_current_span(
            method.removeprefix("/"),
            context=parent_of(metadata),
            kind=SpanKind.SERVER,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": name,
                STATUS_ATTRIBUTE: 0,
                "rpc.user_agent": metadata.get("user-agent", ""),
                "net.transport": "unix",
            },
        )

    async def _failed(
        self, method: str, request: Any, error: Exception, generation: int | None
    ) -> tuple[grpc.StatusCode, str]:
        code, message = status_of(error)
        self._metrics.rpc_failure.labels(method, code.name).inc()
        ours = isinstance(error, DeepseekTgiError)
        level = logging.WARNING if isinstance(error, RequestError) else logging.ERROR
        logger.log(level, "%s failed: %s: %s", method, code.name, message, exc_info=None if ours else error)
        await self._drop(named_batches(request), generation)
        if isinstance(error, DeepseekTgiError) and error.fatal:
            self._on_fatal(error)
        return code, message


def _generation(metadata: dict[str, str]) -> int | None:
    """What the call named; one that could not be read names nothing that could be dropped."""
    try:
        return generation_of(metadata[GENERATION_KEY]) if GENERATION_KEY in metadata else None
    except RequestError:
        return -1
