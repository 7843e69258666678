"""The router process: TGI's own when it is on PATH, else the embedded one; the same command line for both."""

from __future__ import annotations

import logging
import os
import shutil

from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.launcher.check import max_input_tokens
from deepseek_tgi.launcher.process import Child, Spec, python_argv
from deepseek_tgi.launcher.shards import Plan, shortest
from deepseek_tgi.server.sockets import rank_path

logger = logging.getLogger(__name__)

STOCK = "text-generation-router"
CLOSING_S = 5.0
"""The embedded router uses the whole termination timeout to drain, then tells the streams that are left."""


def stock_router(config: LauncherConfig, path: str | None) -> str | None:
    """Where TGI's router is if it is to be used. Raises `ConfigError` if it is asked for by name and not there."""
    if config.router == "embedded":
        return None
    found = shutil.which(STOCK, path=path)
    if found is None and config.router == "tgi":
        raise ConfigError(f"--router tgi: no {STOCK} on PATH; install TGI's, or use --router embedded")
    return found


def router_argv(plan: Plan) -> list[str]:
    """Options in TGI's order. Secrets are not among them: every user of the machine may read a command line."""
    config = plan.config
    always: list[tuple[str, object]] = [
        ("--max-client-batch-size", config.max_client_batch_size),
        ("--max-concurrent-requests", config.max_concurrent_requests),
        ("--max-best-of", config.max_best_of),
        ("--max-stop-sequences", config.max_stop_sequences),
        ("--max-top-n-tokens", config.max_top_n_tokens),
        ("--max-batch-prefill-tokens", plan.max_batch_prefill_tokens),
        ("--waiting-served-ratio", shortest(config.waiting_served_ratio)),
        ("--max-waiting-tokens", config.max_waiting_tokens),
        ("--validation-workers", config.validation_workers),
        ("--hostname", config.hostname),
        ("--port", config.port),
        ("--prometheus-port", config.prometheus_port),
        ("--master-shard-uds-path", rank_path(config.shard_uds_path, 0)),
        ("--tokenizer-name", plan.model),
        ("--payload-limit", config.payload_limit),
        ("--max-input-tokens", max_input_tokens(config)),
        ("--max-total-tokens", config.max_total_tokens),
        ("--usage-stats", config.usage_stats),
    ]
    optional: list[tuple[str, object]] = [
        ("--tokenizer-config-path", config.tokenizer_config_path),
        ("--max-batch-total-tokens", config.max_batch_total_tokens),
        ("--max-batch-size", config.max_batch_size),
        ("--revision", config.revision),
    ]
    argv = [*_pairs(always), *(["--disable-grammar-support"] if config.disable_grammar_support else [])]
    argv += _pairs(optional)
    argv += ["--trust-remote-code"] if config.trust_remote_code else []
    argv += ["--json-output"] if config.json_output else []
    argv += _pairs([("--otlp-endpoint", config.otlp_endpoint), ("--otlp-service-name", config.otlp_service_name)])
    argv += _pairs([("--cors-allow-origin", origin) for origin in config.cors_allow_origin])
    argv += ["--ngrok", *_pairs([("--ngrok-edge", config.ngrok_edge)])] if config.ngrok else []
    return argv


def _pairs(options: list[tuple[str, object]]) -> list[str]:
    return [part for flag, value in options if value is not None for part in (flag, str(value))]


def router_environment(plan: Plan) -> dict[str, str]:
    """Ours, with the hub token under its modern name, the compute type, and the keys that argv must not show."""
    config = plan.config
    env = dict(plan.environ)
    env["COMPUTE_TYPE"] = env.get("COMPUTE_TYPE") or f"{plan.num_shards}-cpu"
    given = {
        "API_KEY": config.api_key,
        "NGROK_AUTHTOKEN": config.ngrok_authtoken,
        "HF_TOKEN": env.get("HF_API_TOKEN"),
        "HUGGINGFACE_HUB_CACHE": config.huggingface_hub_cache,
        "DEEPSEEK_TGI_HOLD_TIMEOUT": shortest(config.hold_timeout),
        "DEEPSEEK_TGI_DRAIN_TIMEOUT": shortest(config.drain_timeout),
        "DEEPSEEK_TGI_ADMIN_TOKEN": config.admin_token,
        "DEEPSEEK_TGI_MODEL_REPOSITORY": config.model_repository,
        "DEEPSEEK_TGI_GRPC_PORT": str(config.grpc_port) if config.grpc_port else None,
        "DEEPSEEK_TGI_GRPC_TLS_CERT": config.grpc_tls_cert,
        "DEEPSEEK_TGI_GRPC_TLS_KEY": config.grpc_tls_key,
        "DEEPSEEK_TGI_GRPC_CLIENT_CA": config.grpc_client_ca,
        "DEEPSEEK_TGI_GRPC_MAX_MESSAGE": str(config.grpc_max_message),
    }
    return env | {name: value for name, value in given.items() if value}


def start(plan: Plan, stock: str | None) -> Child:
    """Start the router; its lines go through as they are."""
    argv = router_argv(plan)
    extra_s = 0.0
    if stock is None:
        logger.info("Starting embedded router on %s:%d", plan.config.hostname, plan.config.port)
        argv += ["--served-model-id", plan.served_name]
        argv += ["--graceful-termination-timeout", str(plan.config.graceful_termination_timeout)]
        argv += ["--probe-port", str(plan.config.probe_port), "--stall-limit", shortest(plan.config.stall_limit)]
        argv += ["--shutdown-delay", shortest(plan.config.shutdown_delay), "--await-shards", str(plan.num_shards)]
        program = python_argv("deepseek_tgi.router")
        extra_s = CLOSING_S + plan.config.shutdown_delay
    else:
        logger.info("Starting %s on %s:%d", stock, plan.config.hostname, plan.config.port)
        program = (stock,)
    return Child(
        Spec(
            "router",
            (*program, *argv),
            router_environment(plan),
            on_stdout=lambda line: _pass(1, line),
            on_stderr=lambda line: _pass(2, line),
            closing_s=extra_s,
        )
    )


def _pass(descriptor: int, line: bytes) -> None:
    try:
        os.write(descriptor, line)
    except OSError:  # our own reader has gone; the router goes on
        return
