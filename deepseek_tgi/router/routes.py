"""Which handler answers which path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepseek_tgi.router.chat_api import ChatApi
from deepseek_tgi.router.completions_api import CompletionsApi
from deepseek_tgi.router.http import Handler
from deepseek_tgi.router.info_api import InfoApi
from deepseek_tgi.router.more_api import MoreApi
from deepseek_tgi.router.service_api import ServiceApi
from deepseek_tgi.router.state import RouterState
from deepseek_tgi.router.tgi_api import NativeApi

if TYPE_CHECKING:
    from deepseek_tgi.router.models import Models


def model_table(state: RouterState) -> dict[tuple[str, str], Handler]:
    """Method and path to handler, of the routes that one model answers."""
    native = NativeApi(state)
    chat, completions = ChatApi(state), CompletionsApi(state)
    more = MoreApi(state, native, chat, completions)
    return {
        ("POST", "/"): native.compat_generate,
        ("POST", "/generate"): native.generate,
        ("POST", "/generate_stream"): native.generate_stream,
        ("POST", "/v1/chat/completions"): chat.completions,
        ("POST", "/v1/completions"): completions.completions,
        ("POST", "/tokenize"): more.tokenize,
        ("POST", "/chat_tokenize"): chat.tokenize,
        ("POST", "/invocations"): more.invocations,
        ("POST", "/vertex"): more.vertex,
        ("GET", "/v1/models"): more.models,
        ("GET", "/info"): InfoApi(state).info,
    }


def route_table(state: RouterState, models: Models) -> dict[tuple[str, str], Handler]:
    """Method and path to handler, of all routes: whichever model serves, and the server itself."""
    service = ServiceApi(state, models)
    routes = model_table(state)
    return {
        **{key: models.showing(key) if key[0] == "GET" else models.handler(key) for key in routes},
        ("GET", "/"): service.health,
        ("GET", "/health"): service.health,
        ("GET", "/ping"): service.health,
        ("GET", "/ready"): service.ready,
        ("GET", "/livez"): service.probe,
        ("GET", "/readyz"): service.probe,
        ("GET", "/startupz"): service.probe,
        ("GET", "/metrics"): service.metrics,
        ("GET", "/docs"): service.docs,
        ("GET", "/api-doc/openapi.json"): service.openapi,
    }
