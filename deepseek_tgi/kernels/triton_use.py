"""Whether Triton's kernels can be had here."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec


def triton_unfit() -> str | None:
    """Why they cannot, if so: Triton builds what launches a kernel with a C compiler, which it looks for like this."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"):
        return None
    return "Triton needs a C compiler, and there is neither CC nor clang nor gcc"
