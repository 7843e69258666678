"""A pluggable TGI backend that serves DeepSeek-family models from AWQ-INT4 weights.

This package knows the wire, the engine and the door; `deepseek_tgi.adapters` knows models and weights,
`deepseek_tgi.probes` knows health. Importing it costs nothing: torch is imported by what needs it.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
