"""The HTTP door before there is a model behind it: probes are answered, everything else is told to come back."""

from __future__ import annotations

from deepseek_tgi.probes.kubernetes import CONTENT_TYPE, answer, describe
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.router.errors import UnhealthyError
from deepseek_tgi.router.http import App, Exchange, Receive, Scope, Send

TGI_PROBES = frozenset({"/", "/health", "/ping", "/ready"})


class Door:
    """Serves `app` once it is open. Until then no route of TGI's answers 200: clients take that for a server to use."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._app: App | None = None

    def open(self, app: App) -> None:
        """From this instant on `app` answers."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._refuse(Exchange(scope, receive, send))

    async def _refuse(self, exchange: Exchange) -> None:
        snapshot = self._owner.current
        found = answer(exchange.path, exchange.query, snapshot, tells_reasons=False)
        if exchange.method in {"GET", "HEAD"} and found is not None:
            await exchange.respond(found.status, found.text.encode(), CONTENT_TYPE)
            return
        if exchange.method in {"GET", "HEAD"} and exchange.path in TGI_PROBES:
            unhealthy = UnhealthyError()
            body = {"error": str(unhealthy), "error_type": unhealthy.error_type}
            await exchange.respond_json(unhealthy.http_status, body)
            return
        text = f"The server is not ready: {describe(snapshot)}"
        await exchange.respond_json(503, {"error": text, "error_type": "not_ready"}, [("retry-after", "1")])
