"""The ASGI application: finds the handler, guards it, and turns whatever it raises into TGI's answers.

The one place that maps errors to HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Mapping

from deepseek_tgi.errors import DeepseekTgiError, NotReadyError
from deepseek_tgi.router.errors import PlainError
from deepseek_tgi.router.http import PLAIN, Cors, Exchange, Handler, Receive, Routes, Scope, Send
from deepseek_tgi.router.state import RouterState

logger = logging.getLogger(__name__)

ADMIN = "/admin/"
"""Paths that ask for a token of their own, and are no traffic that a server which stops would wait for."""
OPEN_PATHS = frozenset(
    {
        "/chat_tokenize",
        "/health",
        "/ping",
        "/ready",
        "/livez",
        "/readyz",
        "/startupz",
        "/info",
        "/v1/models",
        "/metrics",
        "/docs",
        "/api-doc/openapi.json",
    }
)
"""Paths that need no API key; `GET /` is one more."""


class RouterApp:
    """Serves HTTP scopes. While the traffic is draining it finishes what runs and refuses new work."""

    def __init__(self, state: RouterState, table: Mapping[tuple[str, str], Handler]) -> None:
        self._routes = Routes(table)
        self._infer = state.infer
        self._traffic = state.traffic
        self._spans = state.spans
        key = state.config.api_key
        self._authorization = None if key is None else f"Bearer {key}".lower()
        self._cors = Cors(state.config.cors_allow_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        exchange.extra_headers.extend(self._cors.headers(exchange.header("origin")))
        try:
            await self._guarded(exchange)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
        except PlainError as error:
            text = str(error)
            await exchange.respond(error.status, text.encode(), PLAIN if text else "")
        except DeepseekTgiError as error:
            self._infer.note_failed(error)
            await exchange.respond_json(error.http_status, {"error": str(error), "error_type": error.error_type})
        except Exception:
            logger.exception("%s %s failed", exchange.method, exchange.path)
            if not exchange.started:
                await exchange.respond_json(500, {"error": "Internal error", "error_type": "internal"})
        finally:
            exchange.close()

    async def _guarded(self, exchange: Exchange) -> None:
        if exchange.method == "OPTIONS":
            await exchange.respond(200, headers=self._cors.preflight())
            return
        handler = self._routes.find(exchange.method, exchange.path)
        if exchange.method != "POST" or exchange.path.startswith(ADMIN):
            await handler(exchange)
            return
        if exchange.path not in OPEN_PATHS and not self._authorized(exchange.header("authorization")):
            raise PlainError(401)
        if self._traffic.draining:
            exchange.extra_headers.append((b"connection", b"close"))
            raise NotReadyError("The server is shutting down and takes no new requests")
        parent = exchange.header("traceparent"), exchange.header("tracestate")
        with self._traffic.request(), self._spans.request(exchange.path, *parent):
            await handler(exchange)

    def _authorized(self, authorization: str | None) -> bool:
        if self._authorization is None:
            return True
        return hmac.compare_digest((authorization or "").lower().encode(), self._authorization.encode())
