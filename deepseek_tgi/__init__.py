"""A pluggable TGI backend that serves DeepSeek-family models from AWQ-INT4 weights.

This package knows the wire, the engine and the door; `deepseek_tgi.adapters` knows models and weights,
`deepseek_tgi.probes` knows health. Importing it costs nothing: torch is imported by what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepseek_tgi.registry import list_backends, load_backend, register_backend

__version__ = "0.1.0"

__all__ = ["__version__", "list_backends", "load_backend", "register_backend"]


def __getattr__(name: str) -> Any:
    """The registry's door, imported on first use: most processes never ask for it."""
    if name in {"list_backends", "load_backend", "register_backend"}:
        from deepseek_tgi import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
