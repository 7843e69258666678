"""The download process: runs first, so that shards find their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deepseek_tgi.launcher.process import Child, Spec
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
        if not child.wait(float("inf"), hurry=stopping):
            child.terminate()
            if not child.wait(STOP_TIMEOUT_S):
                child.kill()
                child.wait(STOP_TIMEOUT_S)
            return False
        code = child.exit_code()
        if code:
            raise ended(child, code, "failed")
        logger.info("Successfully downloaded weights for %s", model)
    return True


def _at(spec: str) -> tuple[str, str, str]:
    return spec.partition("@")
