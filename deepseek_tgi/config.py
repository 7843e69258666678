"""What the launcher, the shard and the download take: TGI's flags, names and defaults, and our own options.

Source: TGI's launcher and `text-generation-server` command lines. Own options have names of their own
(`DEEPSEEK_TGI_*`), because TGI's launcher parses every name it knows and stops at a value it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_tgi.options import (
    OWN_PREFIX,
    Program,
    Resolved,
    boolean,
    build_parser,
    byte_size,
    choice,
    comma_list,
    device,
    integer,
    listen_address,
    multiple_of,
    number,
    option,
    options_of,
    refuse_unknown_environment,
    resolve,
    text,
    token_count,
)

DEFAULT_BACKEND = "deepseek-quant"
DEFAULT_MODEL = "demo"
TGI_DEFAULT_MODEL = "bigscience/bloom-560m"
DEFAULT_SERVICE_NAME = "text-generation-inference.router"
SHARD_STOP_TIMEOUT_S = 60.0
STALL_LIMIT_S = 120.0
DEFAULT_UDS_PATH = "/tmp/text-generation-server"
QUANTIZERS = (
    *("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4"),
    *("bitsandbytes-fp4", "fp8"),
)
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8_e4m3fn", "fp8", "fp8_e5m2")
KERNELS = ("auto", "native", "cuda", "triton", "torch", "reference")
MLA_PREFILL = ("auto", "absorbed", "expanded")
LOG_LEVELS = ("off", "error", "warn", "warning", "info", "debug", "trace")

MODEL, LIMITS, HTTP, SHARDS, CACHE, CHANGES, TELEMETRY, OTHER = (
    "model", "limits", "HTTP", "shards", "backend and cache (ours)", "changing models, gRPC (ours)", "logs and traces",
    "kept for compatibility",
)  # fmt: skip


def _flag(parse: Any, help_text: str, name: str, group: str, **how: Any) -> Any:
    """A launcher flag: its environment name is the field in upper case, as TGI has it."""
    return option(parse, help_text, env=(name,), group=group, **how)


def _own(parse: Any, help_text: str, name: str, **how: Any) -> Any:
    """An option of ours: its environment name carries our prefix."""
    return option(parse, help_text, env=(OWN_PREFIX + name,), **{"group": CACHE, **how})


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """Everything `text-generation-launcher` takes. Fields are in TGI's order within a group."""

    backend: str = _own(text, "backend to serve with; absent or tgi: TGI's own launcher", "BACKEND", default="tgi")
    router: str = _own(
        choice("auto", "tgi", "embedded"), "HTTP router: TGI's if on PATH, or ours", "ROUTER", default="auto"
    )
    kv_cache_dtype: str | None = option(
        choice(*KV_DTYPES),
        "number format of the KV cache: auto (follows the compute dtype), float32, bfloat16, float16, "
        "fp8_e4m3fn (or fp8), int8 or int4",
        group=CACHE,
        env=(OWN_PREFIX + "KV_CACHE_DTYPE", "KV_CACHE_DTYPE"),
    )
    block_size: int | None = _own(multiple_of(16, 4096), "tokens a KV block, a multiple of 16", "BLOCK_SIZE")
    kv_memory: int | None = _own(byte_size, "memory for the KV cache: auto or a size such as 4GiB", "KV_MEMORY")
    kernels: str | None = _own(
        choice(*KERNELS), "auto, native (CPU), cuda, triton (GPU), torch or reference", "KERNELS"
    )
    device: str | None = _own(device, "auto (a GPU where torch has one), cpu, cuda or cuda:N", "DEVICE")
    mla_prefill: str | None = _own(
        choice(*MLA_PREFILL), "form of DeepSeek's attention in prefill: auto, absorbed or expanded", "MLA_PREFILL"
    )
    num_threads: int | None = _own(integer(0, 4096), "CPU threads of a shard, 0 for what it may use", "NUM_THREADS")

    probe_port: int = _own(
        integer(0, 64000),
        "port of /livez, /readyz and /startupz that answers whatever the HTTP port does, 0 for none",
        "PROBE_PORT",
        default=0,
    )
    stall_limit: float = _own(
        number(1.0, 86400.0),
        "seconds without progress in a step after which a server is no longer live",
        "STALL_LIMIT",
        default=STALL_LIMIT_S,
    )
    shutdown_delay: float = _own(
        number(0.0, 3600.0),
        "seconds after SIGTERM in which a server that is no longer ready still takes new requests",
        "SHUTDOWN_DELAY",
        default=0.0,
    )

    openai_reasons: str = _own(
        choice("tgi", "openai"),
        "finish reasons on OpenAI routes: TGI's words or only OpenAI's",
        "OPENAI_REASONS",
        default="tgi",
        flag=False,
    )

    hold_timeout: float = _own(
        number(0.0, 86400.0),
        "seconds that a new request waits while one model makes room for another",
        "HOLD_TIMEOUT",
        default=60.0,
        group=CHANGES,
    )
    drain_timeout: float = _own(
        number(0.0, 86400.0),
        "seconds that running requests get to end where a model must go before another comes",
        "DRAIN_TIMEOUT",
        default=300.0,
        group=CHANGES,
    )
    admin_token: str | None = _own(
        text,
        "bearer token of the /admin routes, which do not exist without one",
        "ADMIN_TOKEN",
        group=CHANGES,
        secret=True,
    )
    grpc_port: int = _own(
        integer(0, 65535),
        "TCP port of the gRPC services, 0 for none",
        "GRPC_PORT",
        default=0,
        group=CHANGES,
    )
    grpc_tls_cert: str | None = _own(
        text,
        "PEM file of the gRPC port's certificate",
        "GRPC_TLS_CERT",
        group=CHANGES,
    )
    grpc_tls_key: str | None = _own(
        text,
        "PEM file of its key",
        "GRPC_TLS_KEY",
        group=CHANGES,
    )
    grpc_client_ca: str | None = _own(
        text,
        "PEM file of the CA that gRPC clients must show a certificate of",
        "GRPC_CLIENT_CA",
        group=CHANGES,
    )
    grpc_max_message: int = _own(
        integer(1, 2**31 - 1),
        "bytes of a message that a gRPC client may send",
        "GRPC_MAX_MESSAGE",
        default=4 * 1024 * 1024,
        group=CHANGES,
    )
    model_repository: str | None = _own(
        text, "folder whose sub-folders are models to load by name", "MODEL_REPOSITORY", group=CHANGES
    )

    model_id: str = _flag(text, "hub id, local folder, demo or smollm2", "MODEL_ID", MODEL, default=DEFAULT_MODEL)
    revision: str | None = _flag(text, "hub revision", "REVISION", MODEL)
    quantize: str | None = _flag(choice(*QUANTIZERS), "quantizer; the model's own by default", "QUANTIZE", MODEL)
    dtype: str | None = _flag(choice("float16", "bfloat16", "float32"), "compute dtype", "DTYPE", MODEL)
    trust_remote_code: bool = _flag(
        boolean, "no effect: no code from a model folder is run", "TRUST_REMOTE_CODE", MODEL, default=False, switch=True
    )
    tokenizer_config_path: str | None = _flag(
        text, "file that overrides the chat template", "TOKENIZER_CONFIG_PATH", MODEL
    )
    rope_scaling: str | None = _flag(choice("linear", "dynamic"), "rope scaling override", "ROPE_SCALING", MODEL)
    rope_factor: float | None = _flag(number(1e-6), "rope factor override", "ROPE_FACTOR", MODEL)
    huggingface_hub_cache: str | None = _flag(text, "hub cache folder", "HUGGINGFACE_HUB_CACHE", MODEL)
    weights_cache_override: str | None = _flag(
        text, "folder to load the model from, whatever its id", "WEIGHTS_CACHE_OVERRIDE", MODEL
    )
    lora_adapters: str | None = _flag(text, "comma list of adapters", "LORA_ADAPTERS", MODEL)

    max_concurrent_requests: int = _flag(
        integer(1), "requests in flight; 429 above", "MAX_CONCURRENT_REQUESTS", LIMITS, default=128
    )
    max_best_of: int = _flag(integer(1), "limit on best_of", "MAX_BEST_OF", LIMITS, default=2)
    max_stop_sequences: int = _flag(integer(0), "limit on stop sequences", "MAX_STOP_SEQUENCES", LIMITS, default=4)
    max_top_n_tokens: int = _flag(integer(0), "limit on top_n_tokens", "MAX_TOP_N_TOKENS", LIMITS, default=5)
    max_input_tokens: int | None = _flag(token_count, "prompt tokens of a request", "MAX_INPUT_TOKENS", LIMITS)
    max_input_length: int | None = _flag(token_count, "old name of --max-input-tokens", "MAX_INPUT_LENGTH", LIMITS)
    max_total_tokens: int | None = _flag(token_count, "prompt and new tokens of a request", "MAX_TOTAL_TOKENS", LIMITS)
    waiting_served_ratio: float = _flag(
        number(), "waiting to running ratio that forces a prefill", "WAITING_SERVED_RATIO", LIMITS, default=0.3
    )
    max_batch_prefill_tokens: int | None = _flag(
        token_count, "tokens of a prefill step", "MAX_BATCH_PREFILL_TOKENS", LIMITS
    )
    max_batch_total_tokens: int | None = _flag(
        token_count, "tokens in a batch; a shard that measures wins", "MAX_BATCH_TOTAL_TOKENS", LIMITS
    )
    max_waiting_tokens: int = _flag(
        integer(0), "decode steps before waiting requests join", "MAX_WAITING_TOKENS", LIMITS, default=20
    )
    max_batch_size: int | None = _flag(integer(1), "requests in a batch", "MAX_BATCH_SIZE", LIMITS)
    max_client_batch_size: int = _flag(
        integer(1), "prompts in one completions call", "MAX_CLIENT_BATCH_SIZE", LIMITS, default=4
    )

    hostname: str = _flag(listen_address, "listen address; no IP means 0.0.0.0", "HOSTNAME", HTTP, default="0.0.0.0")
    port: int = _flag(integer(0, 65535), "HTTP port", "PORT", HTTP, default=3000, aliases=("-p",))
    prometheus_port: int = _flag(
        integer(0, 65535), "port TGI's router must be able to bind", "PROMETHEUS_PORT", HTTP, default=9000
    )
    cors_allow_origin: tuple[str, ...] = _flag(
        text, "allowed origin, repeatable", "CORS_ALLOW_ORIGIN", HTTP, default=(), repeat=True
    )
    api_key: str | None = _flag(text, "bearer key clients must send", "API_KEY", HTTP, secret=True)
    payload_limit: int = _flag(integer(1), "bytes of a request body", "PAYLOAD_LIMIT", HTTP, default=2_000_000)
    validation_workers: int = _flag(
        integer(0), "tokenizer threads of the router", "VALIDATION_WORKERS", HTTP, default=2
    )
    disable_grammar_support: bool = _flag(
        boolean, "refuse grammars", "DISABLE_GRAMMAR_SUPPORT", HTTP, default=False, switch=True
    )
    enable_prefill_logprobs: bool = _flag(
        boolean, "offer prompt logprobs", "ENABLE_PREFILL_LOGPROBS", HTTP, default=False, switch=True
    )

    sharded: bool | None = _flag(boolean, "run several ranks", "SHARDED", SHARDS)
    num_shard: int | None = _flag(integer(0, 1024), "number of ranks", "NUM_SHARD", SHARDS)
    shard_uds_path: str = _flag(text, "stem of the shard sockets", "SHARD_UDS_PATH", SHARDS, default=DEFAULT_UDS_PATH)
    master_addr: str = _flag(text, "rendezvous host", "MASTER_ADDR", SHARDS, default="localhost")
    master_port: int = _flag(integer(1, 65535), "rendezvous port", "MASTER_PORT", SHARDS, default=29500)
    graceful_termination_timeout: int = _flag(
        integer(0, 86400),
        "seconds to finish in after SIGTERM",
        "GRACEFUL_TERMINATION_TIMEOUT",
        SHARDS,
        default=90,
        aliases=("-g",),
    )

    log_level: str = option(
        text, "off, error, warn, info, debug, trace", default="info", env=("LOG_LEVEL",), flag=False
    )
    json_output: bool = _flag(boolean, "JSON logs", "JSON_OUTPUT", TELEMETRY, default=False, switch=True)
    otlp_endpoint: str | None = _flag(text, "OTLP collector, e.g. http://localhost:4317", "OTLP_ENDPOINT", TELEMETRY)
    otlp_service_name: str = _flag(
        text, "service name of spans", "OTLP_SERVICE_NAME", TELEMETRY, default=DEFAULT_SERVICE_NAME
    )
    env: bool = option(
        boolean, "print the environment and go on", default=False, group=TELEMETRY, switch=True, aliases=("-e",)
    )
    usage_stats: str = _flag(
        choice("on", "off", "no-stack"),
        "passed to TGI's router; ours sends nothing",
        "USAGE_STATS",
        TELEMETRY,
        default="on",
    )

    speculate: int | None = _flag(integer(0, 64), "speculated tokens a step", "SPECULATE", OTHER)
    cuda_graphs: tuple[int, ...] | None = _flag(
        comma_list(integer(0)),
        "comma list of batch sizes whose decode step is captured, 0 for none",
        "CUDA_GRAPHS",
        OTHER,
    )
    disable_custom_kernels: bool = _flag(
        boolean, "old models only", "DISABLE_CUSTOM_KERNELS", OTHER, default=False, switch=True
    )
    cuda_memory_fraction: float = _flag(
        number(0.0, 1.0), "share of GPU memory", "CUDA_MEMORY_FRACTION", OTHER, default=1.0
    )
    watermark_gamma: float | None = _flag(number(), "watermark green share", "WATERMARK_GAMMA", OTHER)
    watermark_delta: float | None = _flag(number(), "watermark bias", "WATERMARK_DELTA", OTHER)
    ngrok: bool = _flag(boolean, "not functional in TGI either", "NGROK", OTHER, default=False, switch=True)
    ngrok_authtoken: str | None = _flag(text, "token of ngrok", "NGROK_AUTHTOKEN", OTHER, secret=True)
    ngrok_edge: str | None = _flag(text, "edge of ngrok", "NGROK_EDGE", OTHER)


def _env(parse: Any, help_text: str, *names: str, **how: Any) -> Any:
    """A value that reaches the shard through the environment only."""
    return option(parse, help_text, env=names, flag=False, **how)


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Everything `text-generation-server serve` takes, as either launcher sends it."""

    model_id: str = option(text, "hub id or local folder", default="", positional=True)
    uds_path: str = option(text, "stem of the socket; the rank is appended", default=DEFAULT_UDS_PATH)
    logger_level: str = option(choice(*LOG_LEVELS), "log level", default="info")
    json_output: bool = option(boolean, "log lines as the launcher reads them", default=False, switch=True)
    trust_remote_code: bool = option(
        boolean, "no effect: no code from a model folder is run", default=False, switch=True
    )
    sharded: bool = option(boolean, "one of several ranks (RANK, WORLD_SIZE)", default=False, switch=True)
    quantize: str | None = option(text, "quantizer; stored tensors decide")
    speculate: int | None = option(integer(0, 64), "speculated tokens a step")
    dtype: str | None = option(choice("float16", "bfloat16", "float32"), "compute dtype")
    kv_cache_dtype: str | None = option(
        choice(*KV_DTYPES), "number format of the KV cache", env=(OWN_PREFIX + "KV_CACHE_DTYPE",), env_first=True
    )
    revision: str | None = option(text, "hub revision")
    otlp_endpoint: str | None = option(text, "OTLP collector", env=("OTLP_ENDPOINT",))
    otlp_service_name: str = option(text, "service name of spans", default=DEFAULT_SERVICE_NAME)
    max_input_tokens: int | None = option(token_count, "prompt tokens of a request")

    rank: int = _env(integer(0, 1023), "rank", "RANK", default=0)
    world_size: int = _env(integer(1, 1024), "number of ranks", "WORLD_SIZE", default=1)
    master_addr: str = _env(text, "where ranks meet", "MASTER_ADDR", default="localhost")
    master_port: int = _env(integer(1, 65535), "port at which ranks meet", "MASTER_PORT", default=29500)
    weights_cache_override: str | None = _env(
        text, "folder to load the model from, whatever its id", "WEIGHTS_CACHE_OVERRIDE"
    )
    max_total_tokens: int | None = _env(token_count, "prompt and new tokens of a request", "MAX_TOTAL_TOKENS")
    max_batch_size: int | None = _env(integer(1), "requests in a batch", "MAX_BATCH_SIZE")
    rope_scaling: str | None = _env(choice("linear", "dynamic"), "rope scaling override", "ROPE_SCALING")
    rope_factor: float | None = _env(number(1e-6), "rope factor override", "ROPE_FACTOR")
    request_logprobs: bool = _env(boolean, "prompt logprobs are offered", "REQUEST_LOGPROBS", default=False)
    prefill_chunking: bool = _env(boolean, "cut long prompts", "PREFILL_CHUNKING", default=True)
    watermark_gamma: float = _env(number(0.0, 1.0), "watermark green share", "WATERMARK_GAMMA", default=0.5)
    watermark_delta: float = _env(number(), "watermark bias", "WATERMARK_DELTA", default=2.0)

    backend: str = _env(text, "backend name or module:Class", OWN_PREFIX + "BACKEND", default=DEFAULT_BACKEND)
    prefix_caching: bool = _env(boolean, "report prefix caching", OWN_PREFIX + "PREFIX_CACHING", default=True)
    block_size: int = _env(multiple_of(16, 4096), "tokens a KV block", OWN_PREFIX + "BLOCK_SIZE", default=16)
    kv_memory: int = _env(byte_size, "bytes for the KV cache, 0 to measure", OWN_PREFIX + "KV_MEMORY", default=0)
    kernels: str = _env(choice(*KERNELS), "kernels", OWN_PREFIX + "KERNELS", default="auto")
    device: str = _env(device, "where to compute", OWN_PREFIX + "DEVICE", default="auto")
    cuda_graphs: tuple[int, ...] | None = _env(
        comma_list(integer(0)), "batch sizes whose decode step is captured, 0 for none", "CUDA_GRAPHS"
    )
    cuda_memory_fraction: float = _env(number(0.0, 1.0), "share of GPU memory", "CUDA_MEMORY_FRACTION", default=1.0)
    mla_prefill: str = _env(
        choice(*MLA_PREFILL), "form of latent attention in prefill", OWN_PREFIX + "MLA_PREFILL", default="auto"
    )
    num_threads: int = _env(
        integer(0, 4096), "CPU threads, 0 for what we may use", OWN_PREFIX + "NUM_THREADS", default=0
    )
    metrics_port: int = _env(
        integer(0, 64000), "Prometheus port of rank 0, 0 for none", OWN_PREFIX + "METRICS_PORT", default=0
    )
    stop_timeout: float = _env(
        number(0.0, 3600.0), "seconds to finish in", OWN_PREFIX + "STOP_TIMEOUT", default=SHARD_STOP_TIMEOUT_S
    )
    stall_limit: float = _env(
        number(1.0, 86400.0),
        "seconds without progress in a step after which the shard is no longer live",
        OWN_PREFIX + "STALL_LIMIT",
        default=STALL_LIMIT_S,
    )
    shard_probe_port: int = _env(
        integer(0, 64000), "probe port of rank 0, 0 for none", OWN_PREFIX + "SHARD_PROBE_PORT", default=0
    )


@dataclass(frozen=True, slots=True)
class DownloadConfig:
    """Everything `text-generation-server download-weights` takes."""

    model_id: str = option(text, "hub id or local folder", default="", positional=True)
    revision: str | None = option(text, "hub revision")
    extension: str = option(text, "suffix of the weight files", default=".safetensors")
    logger_level: str = option(choice(*LOG_LEVELS), "log level", default="info")
    json_output: bool = option(boolean, "log lines as the launcher reads them", default=False, switch=True)
    merge_lora: bool = option(boolean, "accepted; nothing to merge", default=False, switch=True, hidden=True)
    trust_remote_code: bool = option(boolean, "no effect", default=False, switch=True, hidden=True)
    weights_cache_override: str | None = _env(
        text, "folder to load the model from, whatever its id", "WEIGHTS_CACHE_OVERRIDE"
    )
    cache: str | None = _env(text, "folder for models and kernels made here", OWN_PREFIX + "CACHE")


OWN_ENVIRONMENT = frozenset(
    name
    for cls in (LauncherConfig, ShardConfig, DownloadConfig)
    for spec in options_of(cls).values()
    for name in spec.env
    if name.startswith(OWN_PREFIX)
)
"""Every `DEEPSEEK_TGI_*` name that is read; any other is refused at the door."""


def read(cls: type[Any], program: Program, argv: Sequence[str], environ: Mapping[str, str]) -> Resolved[Any]:
    """Resolve `cls` for `program`; `--help` prints and leaves with 0. Raises `ConfigError`."""
    refuse_unknown_environment(environ, OWN_ENVIRONMENT)
    return resolve(cls, build_parser(cls, program), argv, environ)
