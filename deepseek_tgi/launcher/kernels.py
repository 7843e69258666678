"""The native kernels, compiled from the launcher's first moment on, beside all that a shard does before it needs them.

A process of its own, and only a head start: a shard that finds nothing made compiles itself, and says what went wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from deepseek_tgi.config import DEFAULT_BACKEND, LauncherConfig
from deepseek_tgi.kernels.compiler import build_ahead
from deepseek_tgi.launcher import shards
from deepseek_tgi.launcher.gpus import gpus_for
from deepseek_tgi.launcher.model_facts import num_shards
from deepseek_tgi.launcher.process import Child, Spec, python_argv
from deepseek_tgi.telemetry import log

_COMPILED = {None, "auto", "native"}


def start(config: LauncherConfig, environ: Mapping[str, str]) -> Child | None:
    """The process that compiles them; None where no shard would."""
    if config.backend != DEFAULT_BACKEND or config.kernels not in _COMPILED:
        return None
    arguments = (shards.logger_level(), config.device or "auto", str(num_shards(config)))
    return Child(Spec("kernels", python_argv(__name__, *arguments), environ, shards.relog))


def main(argv: Sequence[str]) -> int:
    """Compile, unless the model will compute on GPUs; its exit code says nothing."""
    level, device, ranks = argv
    log.configure("shard", level, os.environ)
    if not gpus_for(device, int(ranks)):
        build_ahead()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
