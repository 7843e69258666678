"""Routes about the server and not about a model: health, readiness, metrics, documentation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from deepseek_tgi.probes.kubernetes import CONTENT_TYPE as CONTENT_TYPE_PROBE
from deepseek_tgi.probes.kubernetes import answer
from deepseek_tgi.probes.state import State
from deepseek_tgi.router.app import OPEN_PATHS
from deepseek_tgi.router.docs_page import PAGE
from deepseek_tgi.router.errors import UnhealthyError
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.metrics import CONTENT_TYPE
from deepseek_tgi.router.openapi import openapi_document
from deepseek_tgi.router.state import RouterState

if TYPE_CHECKING:
    from deepseek_tgi.router.models import Models

LOOK_AGAIN_S = 0.25
"""How often a check that waits for a shard looks whether the shard is known to be silent."""


class ServiceApi:
    """Handlers of the service routes."""

    def __init__(self, state: RouterState, models: Models) -> None:
        self._state = state
        self._models = models
        first = models.current
        changeable = first is not None and first.generation is not None
        self._admin = changeable and state.config.admin_token is not None

    async def health(self, exchange: Exchange) -> None:
        """GET /health, /ping, /: is the shard alive. Load does not matter."""
        checking = asyncio.ensure_future(self._state.liveness.check(may_generate=self._models.open is not None))
        try:
            while not (await asyncio.wait({checking}, timeout=LOOK_AGAIN_S))[0]:
                if self._state.liveness.healthy and self._state.owner.state is State.DEGRADED:
                    raise UnhealthyError  # a question that costs no step is not answered, and the watch agrees
            if not checking.result():
                raise UnhealthyError
        finally:
            checking.cancel()
        await exchange.respond(200)

    async def ready(self, exchange: Exchange) -> None:
        """GET /ready: should traffic come here. Not while draining or while the shard is sick; load does not matter.

        A full server answers 429 to the request itself; taking it out of rotation would only move the load.
        """
        stays = self._state.owner.current.report.ready and not self._state.traffic.draining
        if not stays or not await self._state.liveness.check():
            raise UnhealthyError
        await exchange.respond(200)

    async def probe(self, exchange: Exchange) -> None:
        """GET /livez, /readyz, /startupz: what the state says, now; nobody is asked for it."""
        found = answer(exchange.path, exchange.query, self._state.owner.current, tells_reasons=False)
        assert found is not None, "the route table names the paths"
        await exchange.respond(found.status, found.text.encode(), CONTENT_TYPE_PROBE)

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics: Prometheus text."""
        model = self._models.current
        blocks = None if model is None else model.scheduler.blocks
        if blocks is not None:
            self._state.metrics.gauge("deepseek_tgi_kv_blocks_free", blocks.available_blocks)
        await exchange.respond(200, self._state.metrics.render().encode(), CONTENT_TYPE)

    async def openapi(self, exchange: Exchange) -> None:
        """GET /api-doc/openapi.json."""
        open_paths = OPEN_PATHS if self._state.config.api_key else None
        await exchange.respond_json(200, openapi_document(open_paths, self._admin))

    async def docs(self, exchange: Exchange) -> None:
        """GET /docs: a page that shows the document."""
        await exchange.respond(200, PAGE.encode(), "text/html; charset=utf-8")
