"""What the router process takes: the command line that TGI's launcher builds for its own router, and environment names.

Source: TGI's `backends/v3/src/main.rs`. Defaults are those of the router run alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_tgi.config import DEFAULT_SERVICE_NAME, STALL_LIMIT_S, read
from deepseek_tgi.options import Program, boolean, choice, integer, listen_address, number, option, text, token_count

PROGRAM = Program(
    "text-generation-router",
    "The HTTP door of TGI shards: queue, continuous batching, prefix cache, /generate and OpenAI routes.",
)


def _flag(parse: Any, help_text: str, name: str, **how: Any) -> Any:
    return option(parse, help_text, env=(name,), **how)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything the router takes."""

    max_concurrent_requests: int = _flag(
        integer(1), "requests in flight; 429 above", "MAX_CONCURRENT_REQUESTS", default=128
    )
    max_best_of: int = _flag(integer(1), "limit on best_of", "MAX_BEST_OF", default=2)
    max_stop_sequences: int = _flag(integer(0), "limit on stop sequences", "MAX_STOP_SEQUENCES", default=4)
    max_top_n_tokens: int = _flag(integer(0), "limit on top_n_tokens", "MAX_TOP_N_TOKENS", default=5)
    max_input_tokens: int | None = _flag(token_count, "prompt tokens of a request", "MAX_INPUT_TOKENS")
    max_total_tokens: int | None = _flag(token_count, "prompt and new tokens of a request", "MAX_TOTAL_TOKENS")
    waiting_served_ratio: float = _flag(
        number(), "waiting to running ratio that admits", "WAITING_SERVED_RATIO", default=1.2
    )
    max_batch_prefill_tokens: int = _flag(
        token_count, "tokens of a prefill step", "MAX_BATCH_PREFILL_TOKENS", default=4096
    )
    max_batch_total_tokens: int | None = _flag(
        token_count, "tokens in a batch; a shard that measures wins", "MAX_BATCH_TOTAL_TOKENS"
    )
    max_waiting_tokens: int = _flag(
        integer(0), "decode steps before waiting requests join", "MAX_WAITING_TOKENS", default=20
    )
    max_batch_size: int | None = _flag(integer(0), "requests in a batch", "MAX_BATCH_SIZE")
    max_client_batch_size: int = _flag(
        integer(1), "prompts in one completions call", "MAX_CLIENT_BATCH_SIZE", default=4
    )
    hostname: str = _flag(listen_address, "listen address; no IP means 0.0.0.0", "HOSTNAME", default="0.0.0.0")
    port: int = _flag(integer(0, 65535), "HTTP port", "PORT", default=3000, aliases=("-p",))
    prometheus_port: int = _flag(
        integer(0, 65535), "accepted; metrics are at /metrics of the HTTP port", "PROMETHEUS_PORT", default=9000
    )
    master_shard_uds_path: str = _flag(
        text, "socket of rank 0", "MASTER_SHARD_UDS_PATH", default="/tmp/text-generation-server-0"
    )
    tokenizer_name: str = _flag(text, "hub id or local folder", "TOKENIZER_NAME", default="bigscience/bloom")
    tokenizer_config_path: str | None = _flag(text, "file that overrides the chat template", "TOKENIZER_CONFIG_PATH")
    served_model_id: str | None = option(text, "model name that clients see; the tokenizer's if absent")
    revision: str | None = _flag(text, "hub revision", "REVISION")
    trust_remote_code: bool = _flag(
        boolean, "no effect: no code from a model folder is run", "TRUST_REMOTE_CODE", default=False, switch=True
    )
    validation_workers: int = _flag(integer(0), "tokenizer threads", "VALIDATION_WORKERS", default=2)
    payload_limit: int = _flag(integer(1), "bytes of a request body", "PAYLOAD_LIMIT", default=2_000_000)
    disable_grammar_support: bool = _flag(
        boolean, "refuse grammars", "DISABLE_GRAMMAR_SUPPORT", default=False, switch=True
    )
    cors_allow_origin: tuple[str, ...] = _flag(
        text, "allowed origin, repeatable", "CORS_ALLOW_ORIGIN", default=(), repeat=True
    )
    api_key: str | None = _flag(text, "bearer key clients must send", "API_KEY", secret=True)
    json_output: bool = _flag(boolean, "JSON logs", "JSON_OUTPUT", default=False, switch=True)
    otlp_endpoint: str | None = _flag(text, "OTLP collector", "OTLP_ENDPOINT")
    otlp_service_name: str = _flag(text, "service name of spans", "OTLP_SERVICE_NAME", default=DEFAULT_SERVICE_NAME)
    usage_stats: str = _flag(
        choice("on", "off", "no-stack"), "accepted; nothing is sent anywhere", "USAGE_STATS", default="on"
    )
    ngrok: bool = _flag(boolean, "not functional in TGI either", "NGROK", default=False, switch=True)
    ngrok_authtoken: str | None = _flag(text, "token of ngrok", "NGROK_AUTHTOKEN", secret=True)
    ngrok_edge: str | None = _flag(text, "edge of ngrok", "NGROK_EDGE")
    graceful_termination_timeout: int = _flag(
        integer(0, 86400), "seconds from SIGTERM to the end", "GRACEFUL_TERMINATION_TIMEOUT", default=90
    )
    log_level: str = option(text, "off, error, warn, info, debug", env=("LOG_LEVEL",), default="info", flag=False)
    compute_type: str = option(
        text, "value of the x-compute-type header", env=("COMPUTE_TYPE",), default="gpu+optimized", flag=False
    )
    openai_reasons: str = option(
        choice("tgi", "openai"),
        "finish reasons on OpenAI routes: TGI's words (stop_sequence, streamed eos_token) or only OpenAI's",
        env=("DEEPSEEK_TGI_OPENAI_REASONS",),
        default="tgi",
        flag=False,
    )
    hold_timeout: float = option(
        number(0.0, 86400.0),
        "seconds that a new request waits while one model makes room for another",
        env=("DEEPSEEK_TGI_HOLD_TIMEOUT",),
        default=60.0,
        flag=False,
    )
    drain_timeout: float = option(
        number(0.0, 86400.0),
        "seconds that running requests get to end where a model must go before another comes",
        env=("DEEPSEEK_TGI_DRAIN_TIMEOUT",),
        default=300.0,
        flag=False,
    )
    admin_token: str | None = option(
        text,
        "bearer token of the /admin routes, which do not exist without one",
        env=("DEEPSEEK_TGI_ADMIN_TOKEN",),
        flag=False,
        secret=True,
    )
    model_repository: str | None = option(
        text, "folder whose sub-folders are models to load by name", env=("DEEPSEEK_TGI_MODEL_REPOSITORY",), flag=False
    )
    grpc_port: int = _flag(
        integer(0, 65535),
        "TCP port of the gRPC services, 0 for none",
        "DEEPSEEK_TGI_GRPC_PORT",
        default=0,
        flag=False,
    )
    grpc_tls_cert: str | None = _flag(
        text,
        "PEM file of the gRPC port's certificate",
        "DEEPSEEK_TGI_GRPC_TLS_CERT",
        flag=False,
    )
    grpc_tls_key: str | None = _flag(
        text,
        "PEM file of its key",
        "DEEPSEEK_TGI_GRPC_TLS_KEY",
        flag=False,
    )
    grpc_client_ca: str | None = _flag(
        text,
        "PEM file of the CA that gRPC clients must show a certificate of",
        "DEEPSEEK_TGI_GRPC_CLIENT_CA",
        flag=False,
    )
    grpc_max_message: int = _flag(
        integer(1, 2**31 - 1),
        "bytes of a message that a gRPC client may send",
        "DEEPSEEK_TGI_GRPC_MAX_MESSAGE",
        default=4 * 1024 * 1024,
        flag=False,
    )
    probe_port: int = option(
        integer(0, 64000), "port of its own for /livez, /readyz and /startupz, 0 for none",
        env=("DEEPSEEK_TGI_PROBE_PORT",), default=0,
    )  # fmt: skip
    stall_limit: float = option(
        number(1.0, 86400.0), "seconds of silence of a shard after which this server is no longer live",
        env=("DEEPSEEK_TGI_STALL_LIMIT",), default=STALL_LIMIT_S,
    )  # fmt: skip
    shutdown_delay: float = option(
        number(0.0, 3600.0), "seconds after SIGTERM in which new requests are still taken",
        env=("DEEPSEEK_TGI_SHUTDOWN_DELAY",), default=0.0,
    )  # fmt: skip
    await_shards: int = option(
        integer(0, 1024), "open the door at once and wait for the sockets of so many ranks", default=0, hidden=True
    )
    docker_label: str | None = option(text, "shown by /info", env=("DOCKER_LABEL",), flag=False)
    hf_hub_offline: bool = option(boolean, "use the hub cache only", env=("HF_HUB_OFFLINE",), default=False, flag=False)

    @property
    def model_id(self) -> str:
        """The name clients see."""
        return self.served_model_id or self.tokenizer_name


def from_sources(argv: Sequence[str], environ: Mapping[str, str]) -> RouterConfig:
    """argv over environment over defaults. Raises `ConfigError` naming the option and its value."""
    config: RouterConfig = read(RouterConfig, PROGRAM, argv, environ).config
    return config
