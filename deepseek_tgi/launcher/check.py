"""What is refused before anything is started: contradictions among the options, ports and sockets that are taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.sharding import plan_shards
from deepseek_tgi.config import DEFAULT_BACKEND, TGI_DEFAULT_MODEL, LauncherConfig
from deepseek_tgi.errors import ConfigError, ResourceError
from deepseek_tgi.router.certificates import check_certificates

MAX_PREFILL_TOKENS = 1 << 20
"""The router's warm-up prompt is as long as a prefill step may be: more than this is a typing error, or no memory."""


def check_options(config: LauncherConfig) -> None:
    """Raise `ConfigError` for options that TGI's launcher refuses, or that no model can be served with."""
    if config.model_id == TGI_DEFAULT_MODEL:
        raise ConfigError(
            f"--model-id: TGI's default {TGI_DEFAULT_MODEL} is no model of this backend; "
            "give a hub id or a folder, or leave it out for the bundled demo"
        )
    if config.max_input_tokens is not None and config.max_input_length is not None:
        raise ConfigError("--max-input-tokens and --max-input-length are two names of one limit: give one of them")
    longest, total = max_input_tokens(config), config.max_total_tokens
    if longest is not None and total is not None and longest >= total:
        raise ConfigError(f"--max-input-tokens {longest}: expected less than --max-total-tokens {total}")
    batch = config.max_batch_total_tokens
    if total is not None and batch is not None and total > batch:
        raise ConfigError(f"--max-total-tokens {total}: expected at most --max-batch-total-tokens {batch}")
    prefill = config.max_batch_prefill_tokens
    if prefill is not None and prefill > MAX_PREFILL_TOKENS:
        raise ConfigError(f"--max-batch-prefill-tokens {prefill}: expected at most {MAX_PREFILL_TOKENS}")
    template = config.tokenizer_config_path
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"--tokenizer-config-path {template}: no such file; expected JSON with a chat_template")
    if config.validation_workers == 0:
        raise ConfigError("--validation-workers: got 0, expected at least 1")
    if config.ngrok and not (config.ngrok_authtoken and config.ngrok_edge):
        raise ConfigError("--ngrok: expected --ngrok-authtoken and --ngrok-edge with it")
    if config.sharded and config.quantize == "exl2":
        raise ConfigError("--sharded true: exl2 weights cannot be sharded; use --sharded false")
    for adapter in (config.lora_adapters or "").split(","):
        if adapter.count("@") > 1:
            raise ConfigError(
                f"--lora-adapters: got {adapter!r}, expected id, id=path, id@revision or id=path@revision"
            )


WITHOUT_EFFECT = (*("disable_custom_kernels", "lora_adapters", "ngrok", "speculate", "trust_remote_code"),)
"""Options of TGI that are taken and passed on, and that no process of ours acts on."""


OF_OUR_ROUTER = (
    *("admin_token", "model_repository", "hold_timeout", "drain_timeout", "shutdown_delay"),
    *("grpc_port", "grpc_tls_cert", "grpc_tls_key", "grpc_client_ca", "grpc_max_message"),
)
"""Options that the embedded router acts on, and TGI's does not know."""


def given_without_effect(origins: Mapping[str, str], stock_router: bool) -> list[str]:
    """Where those that somebody gave, and that do nothing here, come from: to be said, not to be swallowed."""
    names = (*WITHOUT_EFFECT, *(OF_OUR_ROUTER if stock_router else ()))
    return [origins[name] for name in names if origins[name] != "default"]


def max_input_tokens(config: LauncherConfig) -> int | None:
    """The prompt limit under either of its names."""
    return config.max_input_tokens if config.max_input_tokens is not None else config.max_input_length


def check_shards(folder: Path | None, backend: str, num_shards: int) -> None:
    """Raise `ConfigError` for a model that cannot be cut into so many parts, as every shard would a few seconds later.

    Other backends have rules of their own. What else is wrong with a config is refused with it.
    """
    if num_shards > 1 and backend == DEFAULT_BACKEND and folder is not None and (folder / "config.json").is_file():
        plan_shards(read_model_config(folder), num_shards)


def check_doors(config: LauncherConfig, stock_router: bool) -> None:
    """Raise `ResourceError` for a port that is taken, `ConfigError` for doors that could not be opened later.

    TGI's router has the HTTP port and its metrics; a port for probes or gRPC is ours.
    """
    ports = {"--port": config.port, "--probe-port": config.probe_port}
    ports |= {"--prometheus-port": config.prometheus_port} if stock_router else {"--grpc-port": config.grpc_port}
    owners: dict[int, str] = {}
    for flag, port in ports.items():
        if port and (other := owners.setdefault(port, flag)) != flag:
            raise ConfigError(f"{flag} {port}: {other} has that number too; each needs a port of its own")
    for flag, port in ports.items():
        if port:
            check_port(config.hostname, port, flag)
    if not stock_router:
        check_certificates(config.grpc_tls_cert, config.grpc_tls_key, config.grpc_client_ca)
    if config.model_repository is not None and not Path(config.model_repository).is_dir():
        raise ConfigError(f"--model-repository {config.model_repository}: no such folder; expected one with models")


def check_port(hostname: str, port: int, flag: str) -> None:
    """Raise `ResourceError` if `port` cannot be listened on; 0 lets the system choose and always works."""
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((hostname, port))
            probe.listen(1)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "is in use by another program" if taken else f"cannot be bound ({error.strerror})"
            raise ResourceError(f"{flag} {port}: {hostname}:{port} {reason}; choose another {flag}") from error
