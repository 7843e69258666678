"""Makes `deepseek_tgi.adapters` and `deepseek_tgi.probes` importable from a checkout that is not installed.

Imported first (`import gpu_path` with `tests` on the path, or `PYTHONPATH=.:tests`) on a machine where nothing can be
installed. Does nothing where the package is: the installed mapping wins.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def reach() -> None:
    """Let the folders `adapters` and `probes` beside the package be found as its own."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import deepseek_tgi

    if importlib.util.find_spec("deepseek_tgi.adapters") is None:
        deepseek_tgi.__path__.append(str(ROOT))


reach()
