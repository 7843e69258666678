"""The shards: their command lines and environment, their log lines, and waiting for their sockets.

Source: TGI's launcher. The argv is TGI's to the letter, our own options travel as `DEEPSEEK_TGI_*`, so that either
launcher can run either server.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepseek_tgi.config import SHARD_STOP_TIMEOUT_S, STALL_LIMIT_S, LauncherConfig
from deepseek_tgi.errors import (
    CheckpointError,
    ChildError,
    ConfigError,
    DeepseekTgiError,
    ResourceError,
    UnsupportedModelError,
)
from deepseek_tgi.launcher.check import max_input_tokens
from deepseek_tgi.launcher.process import Child, Spec, describe_exit, python_argv
from deepseek_tgi.server.sockets import listener_pid, rank_path, taken
from deepseek_tgi.telemetry.log import LEVELS

logger = logging.getLogger(__name__)
shard_logger = logging.getLogger("deepseek_tgi.launcher.shard")

POLL_S = 0.1
TELL_EVERY_S = 10.0
KILL_MARGIN_S = 2
SHOWN_STDERR_CHARACTERS = 16_000

LEVEL_NAMES = ((logging.CRITICAL, "ERROR"), (40, "ERROR"), (30, "WARN"), (20, "INFO"), (10, "DEBUG"), (0, "TRACE"))
ERRORS_BY_EXIT_CODE: Mapping[int, type[DeepseekTgiError]] = {
    cls.exit_code: cls for cls in (ConfigError, CheckpointError, UnsupportedModelError, ResourceError)
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What has been decided before anything starts. `model` is what shards and router load, `served_name` what clients
    see; `environ` is the launcher's own environment with what it exports to all children.
    """

    config: LauncherConfig
    model: str
    served_name: str
    num_shards: int
    quantize: str | None
    max_batch_prefill_tokens: int
    environ: Mapping[str, str]
    shard_probe_port: int = 0
    server_argv: tuple[str, ...] = python_argv("deepseek_tgi.server")


def logger_level() -> str:
    """Name of the most verbose level this launcher logs, as TGI passes it on."""
    level = logging.getLogger("deepseek_tgi").getEffectiveLevel()
    if level > logging.CRITICAL:
        return "OFF"
    return next(name for number, name in LEVEL_NAMES if level >= number)


def python_environment(plan: Plan) -> dict[str, str]:
    """The environment of download and shards: ours without LOG_LEVEL, with TGI's additions for both."""
    config = plan.config
    env = {key: value for key, value in plan.environ.items() if key != "LOG_LEVEL"}
    env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    env["HF_HUB_ENABLE_HF_TRANSFER"] = env.get("HF_HUB_ENABLE_HF_TRANSFER", "1")
    if token := env.get("HF_API_TOKEN"):
        env["HF_TOKEN"] = token
    return env | _present(
        HUGGINGFACE_HUB_CACHE=config.huggingface_hub_cache, WEIGHTS_CACHE_OVERRIDE=config.weights_cache_override
    )


def shard_environment(plan: Plan, rank: int) -> dict[str, str]:
    """TGI's variables for `serve`, and the options of ours that were given."""
    config = plan.config
    env = python_environment(plan) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.num_shards),
        "MASTER_ADDR": config.master_addr,
        "MASTER_PORT": str(config.master_port),
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "CUDA_MEMORY_FRACTION": shortest(config.cuda_memory_fraction),
        "SAFETENSORS_FAST_GPU": "1",
        "DEEPSEEK_TGI_BACKEND": config.backend,
    }
    if config.rope_scaling is not None or config.rope_factor is not None:
        env["ROPE_SCALING"] = config.rope_scaling or "linear"
        env["ROPE_FACTOR"] = shortest(config.rope_factor if config.rope_factor is not None else 1.0)
    return env | _present(
        MAX_TOTAL_TOKENS=config.max_total_tokens,
        MAX_BATCH_SIZE=config.max_batch_size,
        LORA_ADAPTERS=config.lora_adapters,
        REQUEST_LOGPROBS="1" if config.enable_prefill_logprobs else None,
        CUDA_GRAPHS=None if config.cuda_graphs is None else ",".join(map(str, config.cuda_graphs)) or None,
        DISABLE_CUSTOM_KERNELS="True" if config.disable_custom_kernels else None,
        WATERMARK_GAMMA=config.watermark_gamma,
        WATERMARK_DELTA=config.watermark_delta,
        DEEPSEEK_TGI_KV_CACHE_DTYPE=config.kv_cache_dtype,
        DEEPSEEK_TGI_BLOCK_SIZE=config.block_size,
        DEEPSEEK_TGI_KV_MEMORY=config.kv_memory,
        DEEPSEEK_TGI_DEVICE=config.device,
        DEEPSEEK_TGI_KERNELS=config.kernels,
        DEEPSEEK_TGI_MLA_PREFILL=config.mla_prefill,
        DEEPSEEK_TGI_NUM_THREADS=config.num_threads,
        DEEPSEEK_TGI_STALL_LIMIT=config.stall_limit if config.stall_limit != STALL_LIMIT_S else None,
        DEEPSEEK_TGI_SHARD_PROBE_PORT=plan.shard_probe_port or None,
        DEEPSEEK_TGI_STOP_TIMEOUT=_stop_timeout(plan),
    )


def _stop_timeout(plan: Plan) -> int | None:
    """Seconds a shard may finish in where this launcher would kill before the shard's own time is over, else None."""
    allowed = plan.config.graceful_termination_timeout - KILL_MARGIN_S
    given = "DEEPSEEK_TGI_STOP_TIMEOUT" in plan.environ
    return None if given or allowed >= SHARD_STOP_TIMEOUT_S else max(0, allowed)


def shortest(value: float) -> str:
    """`value` with all its digits and none to spare: 8, 0.1, 1.2345678."""
    return str(value).removesuffix(".0")


def _present(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def serve_argv(plan: Plan) -> list[str]:
    """`serve …` in TGI's order."""
    config = plan.config
    argv = ["serve", plan.model, "--uds-path", config.shard_uds_path, "--logger-level", logger_level(), "--json-output"]
    argv += ["--trust-remote-code"] if config.trust_remote_code else []
    argv += ["--sharded"] if plan.num_shards > 1 else []
    optional: list[tuple[str, object]] = [
        ("--quantize", plan.quantize),
        ("--speculate", config.speculate),
        ("--dtype", config.dtype),
        ("--kv-cache-dtype", config.kv_cache_dtype),
        ("--revision", config.revision),
        ("--otlp-endpoint", config.otlp_endpoint),
        ("--otlp-service-name", config.otlp_service_name),
        ("--max-input-tokens", max_input_tokens(config)),
    ]
    for flag, value in optional:
        argv += [flag, str(value)] if value is not None else []
    return argv


def start(plan: Plan, rank: int) -> Child:
    """Start one rank."""
    logger.info("Starting shard", extra={"fields": {"rank": rank}})
    argv = (*plan.server_argv, *serve_argv(plan))
    spec = Spec(f"shard {rank}", argv, shard_environment(plan, rank), relog, holds_stdin=True)
    return Child(spec)


def relog(line: bytes) -> None:
    """Log one stdout line of a Python process at the level it names; what is no such line shows at DEBUG only."""
    try:
        record = json.loads(line)
        level, text = LEVELS[record["record"]["level"]["name"].lower()], str(record["text"]).rstrip()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if line.strip():
            shard_logger.debug("%s", line.decode(errors="replace").rstrip())
        return
    shard_logger.log(min(level, logging.ERROR), "%s", text)


def wait_ready(plan: Plan, ranks: Sequence[Child], children: Sequence[Child], stopping: Callable[[], bool]) -> bool:
    """True when every rank's socket is there, false if asked to stop; `ranks` are in order and among `children`.

    Raises if a child ends before that, or if the socket is another launcher's.
    """
    waiting = {rank_path(plan.config.shard_uds_path, rank): rank for rank in range(plan.num_shards)}
    started = told = time.monotonic()
    while waiting:
        check_alive([*ranks, *children], "cannot start")
        if stopping():
            return False
        for path in [path for path in waiting if os.path.exists(path)]:
            _check_owner(path, ranks[waiting[path]])
            logger.info(
                "Shard ready in %.1f s", time.monotonic() - started, extra={"fields": {"rank": waiting.pop(path)}}
            )
        if time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            logger.info("Waiting for shard to be ready...", extra={"fields": {"ranks": sorted(waiting.values())}})
        if waiting:
            time.sleep(POLL_S)
    return True


def _check_owner(path: str, shard: Child) -> None:
    """Raise if a process outside `shard`'s group listens at `path`: two launchers started together share no model."""
    pid = listener_pid(path)
    try:
        foreign = pid is not None and os.getpgid(pid) != shard.pid
    except ProcessLookupError:
        return
    if foreign:
        raise taken(path)


def check_alive(children: Sequence[Child], what: str) -> None:
    """Raise for the first child that has ended, with the end of its stderr; our own exit codes keep their meaning."""
    for child in children:
        code = child.exit_code()
        if code is not None:
            raise ended(child, code, what)


def ended(child: Child, code: int, what: str) -> DeepseekTgiError:
    """The error for a child that ended with `code`."""
    shown = child.stderr_text().strip()[-SHOWN_STDERR_CHARACTERS:]
    tail = f"; its standard error:\n{shown}" if shown else ""
    name = child.spec.name.capitalize()
    return ERRORS_BY_EXIT_CODE.get(code, ChildError)(f"{name} {what}: ended with {describe_exit(code)}{tail}")
