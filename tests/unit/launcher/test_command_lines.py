"""Argv and environment of the children, held to TGI's launcher; what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.errors import CheckpointError, ChildError, ConfigError, DeepseekTgiError, ResourceError
from deepseek_tgi.launcher import check, download, router, shards
from deepseek_tgi.launcher.shards import Plan


def plan(
    environ: Mapping[str, str] | None = None, num_shards: int = 1, quantize: str | None = None, **config: Any
) -> Plan:
    resolved = LauncherConfig(backend="deepseek-quant", model_id="org/model", **config)
    return Plan(resolved, "org/model", "org/model", num_shards, quantize, 4096, environ or {})


@pytest.fixture(autouse=True)
def info_level() -> Iterator[None]:
    ours = logging.getLogger("deepseek_tgi")
    before = ours.level
    ours.setLevel(logging.INFO)
    yield
    ours.setLevel(before)


def test_serve_as_tgi_writes_it() -> None:
    assert " ".join(shards.serve_argv(plan())) == (
        "serve org/model --uds-path /tmp/text-generation-server --logger-level INFO --json-output"
        " --otlp-service-name text-generation-inference.router"
    )
    full = plan(
        num_shards=2, quantize="awq", trust_remote_code=True, speculate=2, dtype="bfloat16", kv_cache_dtype="int8",
        revision="main", otlp_endpoint="http://c:4317", max_input_length=100,
    )  # fmt: skip
    assert " ".join(shards.serve_argv(full)[7:]) == (
        "--trust-remote-code --sharded --quantize awq --speculate 2 --dtype bfloat16 --kv-cache-dtype int8"
        " --revision main --otlp-endpoint http://c:4317 --otlp-service-name text-generation-inference.router"
        " --max-input-tokens 100"
    )


def test_download_as_tgi_writes_it() -> None:
    argv = download.download_argv(plan(trust_remote_code=True), "org/model", "main", merge_lora=True)
    assert " ".join(argv) == (
        "download-weights org/model --extension .safetensors --logger-level INFO --json-output --merge-lora"
        " --revision main --trust-remote-code"
    )


def test_a_shards_environment() -> None:
    env = shards.shard_environment(plan({"LOG_LEVEL": "debug", "OWN": "kept", "HF_API_TOKEN": "t"}, num_shards=2), 1)
    expected = {
        "OWN": "kept", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "CUDA_MEMORY_FRACTION": "1", "SAFETENSORS_FAST_GPU": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ENABLE_HF_TRANSFER": "1", "HF_TOKEN": "t", "HF_API_TOKEN": "t",
        "DEEPSEEK_TGI_BACKEND": "deepseek-quant",
    }  # fmt: skip
    assert env == expected


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({"max_total_tokens": 512, "max_batch_size": 4}, {"MAX_TOTAL_TOKENS": "512", "MAX_BATCH_SIZE": "4"}),
        ({"rope_factor": 2.0}, {"ROPE_SCALING": "linear", "ROPE_FACTOR": "2"}),
        ({"rope_factor": 1.2345678}, {"ROPE_SCALING": "linear", "ROPE_FACTOR": "1.2345678"}),
        ({"rope_scaling": "dynamic"}, {"ROPE_SCALING": "dynamic", "ROPE_FACTOR": "1"}),
        ({"enable_prefill_logprobs": True}, {"REQUEST_LOGPROBS": "1"}),
        ({"cuda_graphs": (1, 2)}, {"CUDA_GRAPHS": "1,2"}),
        ({"cuda_graphs": (0,)}, {"CUDA_GRAPHS": "0"}),
        ({"device": "cuda:1"}, {"DEEPSEEK_TGI_DEVICE": "cuda:1"}),
        ({"disable_custom_kernels": True}, {"DISABLE_CUSTOM_KERNELS": "True"}),
        ({"graceful_termination_timeout": 30}, {"DEEPSEEK_TGI_STOP_TIMEOUT": "28"}),
        ({"graceful_termination_timeout": 1}, {"DEEPSEEK_TGI_STOP_TIMEOUT": "0"}),
        ({"mla_prefill": "absorbed"}, {"DEEPSEEK_TGI_MLA_PREFILL": "absorbed"}),
        ({"kv_memory": 1024, "block_size": 32}, {"DEEPSEEK_TGI_KV_MEMORY": "1024", "DEEPSEEK_TGI_BLOCK_SIZE": "32"}),
    ],
)
def test_options_that_travel_in_the_environment(config: dict[str, Any], added: dict[str, str]) -> None:
    base = shards.shard_environment(plan(), 0)
    assert shards.shard_environment(plan(**config), 0) == base | added


def test_the_router_as_tgi_writes_it() -> None:
    assert " ".join(router.router_argv(plan())) == (
        "--max-client-batch-size 4 --max-concurrent-requests 128 --max-best-of 2 --max-stop-sequences 4"
        " --max-top-n-tokens 5 --max-batch-prefill-tokens 4096 --waiting-served-ratio 0.3 --max-waiting-tokens 20"
        " --validation-workers 2 --hostname 0.0.0.0 --port 3000 --prometheus-port 9000"
        " --master-shard-uds-path /tmp/text-generation-server-0 --tokenizer-name org/model --payload-limit 2000000"
        " --usage-stats on --otlp-service-name text-generation-inference.router"
    )


def test_secrets_travel_beside_the_routers_command_line() -> None:
    secret = plan({"HF_API_TOKEN": "hub"}, api_key="key", ngrok=True, ngrok_authtoken="token", ngrok_edge="edge")
    argv = router.router_argv(secret)
    assert not {"key", "token", "hub"} & set(argv)
    env = router.router_environment(secret)
    assert (env["API_KEY"], env["NGROK_AUTHTOKEN"], env["HF_TOKEN"]) == ("key", "token", "hub")


def test_tgis_router_is_taken_if_it_is_there(tmp_path: Any) -> None:
    path = tmp_path / "text-generation-router"
    assert router.stock_router(LauncherConfig(), str(tmp_path)) is None
    with pytest.raises(ConfigError, match="--router tgi: no text-generation-router on PATH"):
        router.stock_router(LauncherConfig(router="tgi"), str(tmp_path))
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    assert router.stock_router(LauncherConfig(), str(tmp_path)) == str(path)
    assert router.stock_router(LauncherConfig(router="embedded"), str(tmp_path)) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_input_tokens": 5, "max_input_length": 5}, "two names of one limit"),
        ({"max_input_tokens": 10, "max_total_tokens": 10}, "--max-input-tokens 10: expected less than"),
        ({"max_input_length": 10, "max_total_tokens": 9}, "expected less than --max-total-tokens 9"),
        ({"max_total_tokens": 10, "max_batch_total_tokens": 9}, "--max-total-tokens 10: expected at most"),
        ({"max_batch_prefill_tokens": 1048577}, "--max-batch-prefill-tokens 1048577: expected at most 1048576"),
        ({"validation_workers": 0}, "--validation-workers: got 0"),
        ({"tokenizer_config_path": "/no/such.json"}, "--tokenizer-config-path /no/such.json: no such file"),
        ({"ngrok": True, "ngrok_edge": "e"}, "--ngrok-authtoken"),
        ({"sharded": True, "quantize": "exl2"}, "exl2 weights cannot be sharded"),
        ({"lora_adapters": "a,b@c@d"}, "got 'b@c@d'"),
        ({"model_id": "bigscience/bloom-560m"}, "leave it out for the bundled demo"),
    ],
)
def test_contradicting_options_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check.check_options(LauncherConfig(**{"model_id": "m", **config}))


@pytest.mark.parametrize(
    ("config", "stock", "message"),
    [
        ({"port": 1, "probe_port": 1}, False, "--probe-port 1: --port has that number too"),
        ({"port": 1, "grpc_port": 1}, False, "--grpc-port 1: --port has that number too"),
        ({"port": 0, "probe_port": 1, "grpc_port": 1}, False, "--grpc-port 1: --probe-port has that number too"),
        ({"port": 1, "prometheus_port": 1}, True, "--prometheus-port 1: --port has that number too"),
        ({"port": 0, "grpc_tls_cert": "/no/such.pem"}, False, "belong together"),
        (
            {"port": 0, "grpc_tls_cert": "/no/such.pem", "grpc_tls_key": "/no/such.key"},
            False,
            "/no/such.pem: cannot be",
        ),
        ({"port": 0, "model_repository": "/no/such"}, False, "--model-repository /no/such: no such folder"),
    ],
)
def test_doors_that_could_not_open_later_are_refused_now(config: dict[str, Any], stock: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check.check_doors(LauncherConfig(**{"model_id": "m", "hostname": "127.0.0.1", **config}), stock)


def test_what_only_our_router_knows_has_an_effect_where_it_runs() -> None:
    origins = dict.fromkeys((each.name for each in dataclasses.fields(LauncherConfig)), "default")
    origins |= {"grpc_port": "flag --grpc-port", "speculate": "environment SPECULATE", "port": "flag --port"}
    assert check.given_without_effect(origins, stock_router=False) == ["environment SPECULATE"]
    assert check.given_without_effect(origins, stock_router=True) == ["environment SPECULATE", "flag --grpc-port"]


@pytest.mark.parametrize("flag", ["port", "probe_port", "grpc_port"])
def test_every_door_that_is_taken_is_named(flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        taken = listener.getsockname()[1]
        config = LauncherConfig(**{"model_id": "m", "hostname": "127.0.0.1", "port": 0, flag: taken})
        with pytest.raises(ResourceError, match=f"--{flag.replace('_', '-')} {taken}: .* is in use"):
            check.check_doors(config, stock_router=False)
    check.check_doors(config, stock_router=False)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"--port {port}: 127\.0\.0\.1:{port} is in use"):
            check.check_port("127.0.0.1", port, "--port")
    check.check_port("127.0.0.1", 0, "--port")


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        (b'{"text": "hello \\n", "record": {"level": {"name": "INFO"}}}\n', "INFO", "hello"),
        (b'{"text": "done", "record": {"level": {"name": "SUCCESS"}, "extra": {}}}\n', "INFO", "done"),
        (b'{"text": "bad", "record": {"level": {"name": "CRITICAL"}}}\n', "ERROR", "bad"),
        (b"Warming up\n", "DEBUG", "Warming up"),
        (b'{"text": "no record"}\n', "DEBUG", '{"text": "no record"}'),
        (b'["list"]\n', "DEBUG", '["list"]'),
        (b"\xff\xfe\n", "DEBUG", "\ufffd\ufffd"),
        (b"[" * 5000 + b"\n", "DEBUG", "[" * 5000),
        (b"\n", None, None),
    ],
    ids=range(9),
)
def test_shard_lines_are_logged_at_their_level(
    line: bytes, level: str | None, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "deepseek_tgi.launcher.shard"):
        shards.relog(line)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == ([(level, text)] if level else [])


@pytest.mark.parametrize(
    ("level", "name"),
    [(100, "OFF"), (50, "ERROR"), (40, "ERROR"), (30, "WARN"), (20, "INFO"), (10, "DEBUG"), (5, "TRACE")],
)
def test_the_level_is_passed_on_in_tgis_words(level: int, name: str) -> None:
    logging.getLogger("deepseek_tgi").setLevel(level)
    assert shards.logger_level() == name


class Ended:
    def __init__(self, stderr: str) -> None:
        self.spec = type("Spec", (), {"name": "shard 0"})
        self._stderr = stderr

    def stderr_text(self) -> str:
        return self._stderr


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (3, CheckpointError, "code 3"),
        (1, ChildError, "code 1"),
        (-9, ChildError, "signal SIGKILL"),
        (0, ChildError, "code 0"),
    ],
)
def test_a_dead_child_is_an_error_with_its_last_words(code: int, kind: type[DeepseekTgiError], words: str) -> None:
    error = shards.ended(Ended("no such file"), code, "cannot start")  # type: ignore[arg-type]
    assert type(error) is kind
    assert str(error) == f"Shard 0 cannot start: ended with {words}; its standard error:\nno such file"
