"""`/info`: what one model is and within which limits it is served."""

from __future__ import annotations

from deepseek_tgi import __version__
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.state import RouterState


class InfoApi:
    """Handler of the route."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

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
