"""Routes about the server and not about text: health, readiness, info, metrics."""

from __future__ import annotations

from deepseek_tgi import __version__
from deepseek_tgi.router.app import OPEN_PATHS
from deepseek_tgi.router.docs_page import PAGE
from deepseek_tgi.router.errors import UnhealthyError
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.metrics import CONTENT_TYPE
from deepseek_tgi.router.openapi import openapi_document
from deepseek_tgi.router.state import RouterState


class ServiceApi:
    """Handlers of the service routes."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def health(self, exchange: Exchange) -> None:
        """GET /health, /ping, /: is the shard alive. Load does not matter."""
        if not await self._state.liveness.check():
            raise UnhealthyError
        await exchange.respond(200)

    async def ready(self, exchange: Exchange) -> None:
        """GET /ready: should traffic come here. Not while draining or while the shard is sick; load does not matter.

        A full server answers 429 to the request itself; taking it out of rotation would only move the load.
        """
        if self._state.traffic.draining or not await self._state.liveness.check():
            raise UnhealthyError
        await exchange.respond(200)

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics: Prometheus text."""
        blocks = self._state.infer.scheduler.blocks
        if blocks is not None:
            self._state.metrics.gauge("deepseek_tgi_kv_blocks_free", blocks.available_blocks)
        await exchange.respond(200, self._state.metrics.render().encode(), CONTENT_TYPE)

    async def info(self, exchange: Exchange) -> None:
        """GET /info: what is served and within which limits."""
        state, config = self._state, self._state.config
        await exchange.respond_json(
            200,
            {
                "model_id": config.model_id,
                "model_sha": state.model_sha,
                "model_pipeline_tag": state.pipeline_tag,
                "max_concurrent_requests": config.max_concurrent_requests,
                "max_best_of": state.limits.max_best_of,
                "max_stop_sequences": state.limits.max_stop_sequences,
                "max_input_tokens": state.limits.max_input_tokens,
                "max_total_tokens": state.limits.max_total_tokens,
                "validation_workers": config.validation_workers,
                "max_client_batch_size": config.max_client_batch_size,
                "router": "text-generation-router",
                "version": __version__,
                "sha": None,
                "docker_label": config.docker_label,
            },
        )

    async def openapi(self, exchange: Exchange) -> None:
        """GET /api-doc/openapi.json."""
        await exchange.respond_json(200, openapi_document(OPEN_PATHS if self._state.config.api_key else None))

    async def docs(self, exchange: Exchange) -> None:
        """GET /docs: a page that shows the document."""
        await exchange.respond(200, PAGE.encode(), "text/html; charset=utf-8")
