"""Which handler answers which path."""

from __future__ import annotations

from deepseek_tgi.router.http import Handler
from deepseek_tgi.router.service_api import ServiceApi
from deepseek_tgi.router.state import RouterState
from deepseek_tgi.router.tgi_api import NativeApi


def route_table(state: RouterState) -> dict[tuple[str, str], Handler]:
    """Method and path to handler."""
    native = NativeApi(state)
    service = ServiceApi(state)
    return {
        ("POST", "/"): native.compat_generate,
        ("POST", "/generate"): native.generate,
        ("POST", "/generate_stream"): native.generate_stream,
        ("GET", "/"): service.health,
        ("GET", "/health"): service.health,
        ("GET", "/ping"): service.health,
        ("GET", "/ready"): service.ready,
        ("GET", "/info"): service.info,
        ("GET", "/metrics"): service.metrics,
    }
