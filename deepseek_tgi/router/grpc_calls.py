"""What every call on the gRPC port goes through: who may make it, whether work is taken, and errors as statuses."""

from __future__ import annotations

import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from deepseek_tgi.errors import DeepseekTgiError, NotReadyError
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.infer import Infer
from deepseek_tgi.router.spans import Spans
from deepseek_tgi.router.traffic import Traffic

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 1500


class UnauthenticatedError(DeepseekTgiError):
    """A call without the token that it needs."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    error_type = "unauthorized"


class ForbiddenError(DeepseekTgiError):
    """A call that this server does not offer to anybody."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403
    error_type = "forbidden"


class UnknownModelError(DeepseekTgiError):
    """A model that is not served."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    error_type = "unknown_model"


@dataclass(frozen=True, slots=True)
class Doorkeeper:
    """Who may do what. A client whose certificate was checked may do all."""

    api_key: str | None
    admin_token: str | None
    certificates: bool

    @classmethod
    def of(cls, config: RouterConfig) -> Doorkeeper:
        """As the options say."""
        return cls(config.api_key, config.admin_token, config.grpc_client_ca is not None)

    def generation(self, context: Any) -> None:
        """Raise `UnauthenticatedError` unless the caller may generate."""
        if self.api_key is not None and not self._certified(context) and not _bears(context, self.api_key):
            raise UnauthenticatedError("this call needs the metadata `authorization: Bearer <api key>`")

    def change(self, context: Any) -> None:
        """Raise `ForbiddenError` or `UnauthenticatedError` unless the caller may change the model."""
        if self._certified(context):
            return
        if self.admin_token is None:
            raise ForbiddenError(
                "models cannot be changed here: set DEEPSEEK_TGI_ADMIN_TOKEN, or have clients show certificates"
            )
        if not _bears(context, self.admin_token):
            raise UnauthenticatedError("this call needs the metadata `authorization: Bearer <admin token>`")

    def _certified(self, context: Any) -> bool:
        return self.certificates and bool(context.peer_identities())


def _bears(context: Any, token: str) -> bool:
    given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
    given = given if isinstance(given, str) else given.decode("latin-1")
    scheme, _, rest = given.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(rest.encode(), token.encode())


@dataclass(frozen=True, slots=True)
class Calls:
    """What the services of the port have in common."""

    doorkeeper: Doorkeeper
    traffic: Traffic
    spans: Spans
    infer: Infer

    def admit(self, context: Any) -> None:
        """Raise unless this caller's generation may begin now."""
        self.doorkeeper.generation(context)
        if self.traffic.draining:
            raise NotReadyError("The server is shutting down and takes no new requests")


def answered(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A unary call whose errors become statuses."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001 - the mapper of this port
            await _refuse(self.calls, method.__name__, context, error)

    return call


def streamed(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """A streaming call whose errors become statuses."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in method(self, request, context):
                yield answer
        except Exception as error:  # noqa: BLE001 - the mapper of this port
            await _refuse(self.calls, method.__name__, context, error)

    return call


async def _refuse(calls: Calls, method: str, context: Any, error: Exception) -> None:
    if isinstance(error, DeepseekTgiError):
        calls.infer.note_failed(error)
        code, text = grpc.StatusCode[error.grpc_code], str(error)
    else:
        logger.exception("%s failed", method, exc_info=error)
        code, text = grpc.StatusCode.INTERNAL, f"Internal error: {type(error).__name__}"
    await context.abort(code, text[:MAX_MESSAGE_CHARACTERS])
