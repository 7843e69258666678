"""`python -m deepseek_tgi.server serve|download-weights …`: what TGI's launcher runs as `text-generation-server`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepseek_tgi import __version__
from deepseek_tgi.config import DownloadConfig, ShardConfig, read
from deepseek_tgi.errors import ConfigError, DeepseekTgiError
from deepseek_tgi.options import Program
from deepseek_tgi.telemetry import log
from deepseek_tgi.telemetry.streams import open_standard_streams

if TYPE_CHECKING:
    from deepseek_tgi.server.loader import Load

logger = logging.getLogger("deepseek_tgi.server")

SERVE = Program("text-generation-server serve", "Serve one rank of a model on a unix socket.", "MODEL_ID [options]")
DOWNLOAD = Program(
    "text-generation-server download-weights", "Make sure a model's weights are on this machine.", "MODEL_ID [options]"
)
USAGE = "text-generation-server serve MODEL_ID [options] | download-weights MODEL_ID [options] | --version"


def main(argv: Sequence[str], load: Load | None = None) -> int:
    """Run one command; its exit code. A failure goes to stderr, which the launcher prints when the process ends.

    `load` makes the engine of `serve`; None loads the model by its backend.
    """
    open_standard_streams()
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch works without it, and so do we
    try:
        return _run(argv, load)
    except DeepseekTgiError as error:
        if "--json-output" in argv:  # else stdout and stderr are one terminal
            logger.error("%s", error)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code


def _run(argv: Sequence[str], load: Load | None) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command == "--version":
        sys.stdout.write(f"text-generation-server (deepseek-tgi {__version__})\n")
        return 0
    if command in {"--help", "-h"}:
        sys.stdout.write(f"usage: {USAGE}\n")
        return 0
    if command == "download-weights":
        return _download(rest)
    if command == "serve":
        return _serve(rest, load)
    raise ConfigError(f"text-generation-server: got {command!r}, expected: {USAGE}")


def _serve(argv: Sequence[str], load: Load | None) -> int:
    config: ShardConfig = read(ShardConfig, SERVE, argv, os.environ).config
    log.configure("shard" if config.json_output else "plain", config.logger_level, os.environ)
    # Read when torch is loaded: its helper threads are to sleep between ops, not to spin on the cores our kernels use.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from deepseek_tgi.server import serve
    from deepseek_tgi.server.loading import load_engine

    serve.check(config)
    return serve.serve(config, load or load_engine)


def _download(argv: Sequence[str]) -> int:
    config: DownloadConfig = read(DownloadConfig, DOWNLOAD, argv, os.environ).config
    log.configure("shard" if config.json_output else "plain", config.logger_level, os.environ)
    # TGI's launcher forces this on; without the package the hub client would only raise.
    os.environ.pop("HF_HUB_ENABLE_HF_TRANSFER", None)
    from deepseek_tgi.server.weights import prepare

    logger.info("weights of %s are in %s", config.model_id, prepare(config))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: it would join the engine's thread, and with it a forward that nobody waits for.
    os._exit(code)
