"""Flags, environment names and defaults, held to the table of TGI's launcher."""

from __future__ import annotations

from typing import Any

import pytest

from deepseek_tgi.config import KV_DTYPES, LauncherConfig, ShardConfig, read
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.options import Program, Resolved

PROGRAM = Program("test", "A test.")

# TGI's launcher, version 3.3: flag, default. `None` is "not set". Typed from its documentation, not from our code;
# the model is ours.
TGI_FLAGS: dict[str, Any] = {
    "--model-id": "demo", "--revision": None, "--validation-workers": 2, "--sharded": None,
    "--num-shard": None, "--quantize": None, "--speculate": None, "--dtype": None, "--kv-cache-dtype": None,
    "--trust-remote-code": False, "--max-concurrent-requests": 128, "--max-best-of": 2, "--max-stop-sequences": 4,
    "--max-top-n-tokens": 5, "--max-input-tokens": None, "--max-input-length": None, "--max-total-tokens": None,
    "--waiting-served-ratio": 0.3, "--max-batch-prefill-tokens": None, "--max-batch-total-tokens": None,
    "--max-waiting-tokens": 20, "--max-batch-size": None, "--cuda-graphs": None, "--hostname": "0.0.0.0",
    "--port": 3000, "--prometheus-port": 9000, "--shard-uds-path": "/tmp/text-generation-server",
    "--master-addr": "localhost", "--master-port": 29500, "--huggingface-hub-cache": None,
    "--weights-cache-override": None,
    "--disable-custom-kernels": False, "--cuda-memory-fraction": 1.0, "--rope-scaling": None, "--rope-factor": None,
    "--json-output": False, "--otlp-endpoint": None, "--otlp-service-name": "text-generation-inference.router",
    "--cors-allow-origin": (), "--api-key": None, "--watermark-gamma": None, "--watermark-delta": None,
    "--ngrok": False, "--ngrok-authtoken": None, "--ngrok-edge": None, "--tokenizer-config-path": None,
    "--disable-grammar-support": False, "--env": False, "--max-client-batch-size": 4, "--lora-adapters": None,
    "--usage-stats": "on", "--payload-limit": 2_000_000, "--enable-prefill-logprobs": False,
    "--graceful-termination-timeout": 90,
}  # fmt: skip
SAMPLES: dict[str, tuple[str, Any]] = {
    "--sharded": ("true", True), "--quantize": ("awq", "awq"), "--dtype": ("bfloat16", "bfloat16"),
    "--kv-cache-dtype": ("fp8_e5m2", "fp8_e5m2"), "--cuda-graphs": ("1,2,8", (1, 2, 8)), "--hostname": ("::1", "::1"),
    "--rope-scaling": ("dynamic", "dynamic"), "--cors-allow-origin": ("https://a", ("https://a",)),
    "--usage-stats": ("no-stack", "no-stack"), "--cuda-memory-fraction": ("0.5", 0.5), "--rope-factor": ("2.5", 2.5),
    "--waiting-served-ratio": ("1.2", 1.2), "--watermark-gamma": ("0.25", 0.25), "--watermark-delta": ("2", 2.0),
    "--max-top-n-tokens": ("7", 7),
}  # fmt: skip


def launcher(*argv: str, **environ: str) -> Resolved[LauncherConfig]:
    return read(LauncherConfig, PROGRAM, argv, environ)


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@pytest.mark.parametrize("flag", TGI_FLAGS)
def test_every_flag_of_tgi_has_its_default(flag: str) -> None:
    assert getattr(launcher().config, field_of(flag)) == TGI_FLAGS[flag]


def sample(flag: str) -> tuple[str, Any]:
    if flag in SAMPLES:
        return SAMPLES[flag]
    whole = isinstance(TGI_FLAGS[flag], int) or flag.startswith(("--max-", "--num-", "--speculate"))
    return ("17", 17) if whole else ("some-text", "some-text")


@pytest.mark.parametrize("flag", [f for f, default in TGI_FLAGS.items() if default is not False])
def test_a_flag_beats_its_environment_name_which_beats_the_default(flag: str) -> None:
    text, value = sample(flag)
    name = field_of(flag).upper()
    by_flag, by_env = launcher(flag, text, **{name: "ignored"}), launcher(**{name: text})
    assert getattr(by_flag.config, field_of(flag)) == value
    assert getattr(by_env.config, field_of(flag)) == value
    assert by_flag.origins[field_of(flag)] == f"flag {flag}"
    assert by_env.origins[field_of(flag)] == f"environment {name}"
    assert launcher().origins[field_of(flag)] == "default"


@pytest.mark.parametrize("flag", [f for f, default in TGI_FLAGS.items() if default is False])
def test_switches_need_no_value_and_swallow_none(flag: str) -> None:
    assert getattr(launcher(flag, "--port", "1").config, field_of(flag)) is True
    assert getattr(launcher(f"{flag}=false").config, field_of(flag)) is False


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("FALSE", False), ("0", False), ("", False)])
def test_switches_read_the_environment(text: str, value: bool) -> None:
    assert launcher(JSON_OUTPUT=text).config.json_output is value


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [("-p 8080", "port", 8080), ("-g 5", "graceful_termination_timeout", 5), ("-e", "env", True)],
)
def test_short_flags(argv: str, field: str, value: Any) -> None:
    assert getattr(launcher(*argv.split()).config, field) == value


def test_a_hostname_that_is_no_address_means_every_address() -> None:
    assert launcher(HOSTNAME="my-pod-7d9f").config.hostname == "0.0.0.0"


def test_repeated_origins_are_all_kept() -> None:
    got = launcher("--cors-allow-origin", "https://a", "--cors-allow-origin", "https://b").config
    assert got.cors_allow_origin == ("https://a", "https://b")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], r"flag --port: got '70000', expected a whole number from 0 to 65535"),
        (["--max-total-tokens", "5000000000"], r"got '5000000000', expected .* from 1 to 4294967295"),
        (["--max-batch-size", "9" * 19], r"a whole number of at least 1"),
        (["--kv-memory", "0.5"], r"at least 1 byte"),
        (["--port", "3e3"], r"got '3e3'"),
        (["--sharded", "maybe"], r"flag --sharded: got 'maybe', expected true or false"),
        (["--quantize", "int3"], r"got 'int3', expected one of awq, compressed-tensors, "),
        (["--cuda-graphs", "1,x"], r"a comma list, each item a whole number"),
        (["--cuda-memory-fraction", "nan"], r"got 'nan', expected a number of at least 0 and at most 1"),
        (["--max-totl-tokens", "5"], r"unknown option '--max-totl-tokens'; did you mean --max-total-tokens"),
        (["--max-total"], r"unknown option '--max-total'"),
        (["stray"], r"unexpected argument 'stray'"),
        (["--port"], r"expected one argument"),
        (["-"], r"unexpected argument|unknown option"),
        (["--", "x"], r"unknown option|unexpected argument"),
        (["--kv-memory", "lots"], r"expected auto, or a size such as 4GiB"),
        (["--block-size", "8"], r"a multiple of 16 from 16 to 4096"),
        (["--block-size", "24"], r"got '24', expected a multiple of 16"),
    ],
)
def test_wrong_values_say_what_would_work(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        launcher(*argv)
    assert caught.value.exit_code == 2


def test_a_wrong_environment_value_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"environment PORT: got 'tcp://10\.0\.0\.1:80'"):
        launcher(PORT="tcp://10.0.0.1:80")


def test_a_misspelt_name_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DEEPSEEK_TGI_KVMEMORY: unknown name; did you mean DEEPSEEK_TGI_KV_MEMORY"):
        launcher(DEEPSEEK_TGI_KVMEMORY="1GiB")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        ("4096", 4096),
        ("auto", 0),
    ],
)
def test_memory_sizes(text: str, size: int) -> None:
    assert launcher("--kv-memory", text).config.kv_memory == size


SERVE = "--uds-path /run/s --logger-level WARN --json-output --trust-remote-code --sharded --quantize awq --speculate 0 --dtype bfloat16 --kv-cache-dtype fp8_e5m2 --revision main --otlp-endpoint http://c:4317 --otlp-service-name n --max-input-tokens 9".split()  # noqa: E501, SIM905  # fmt: skip


@pytest.mark.parametrize("argv", [["m", *SERVE], [*SERVE, "m"], [*SERVE[:6], "m", *SERVE[6:]]])
def test_the_shards_argv_works_in_any_order(argv: list[str]) -> None:
    config: ShardConfig = read(ShardConfig, PROGRAM, argv, {"RANK": "1", "WORLD_SIZE": "2", "SOMETHING": "else"}).config
    assert (config.model_id, config.uds_path, config.logger_level) == ("m", "/run/s", "warn")
    assert config.json_output
    assert config.sharded
    assert config.trust_remote_code
    assert (config.quantize, config.dtype, config.kv_cache_dtype) == ("awq", "bfloat16", "fp8_e5m2")
    assert (config.revision, config.otlp_endpoint, config.otlp_service_name) == ("main", "http://c:4317", "n")
    assert (config.max_input_tokens, config.rank, config.world_size) == (9, 1, 2)


def test_our_cache_format_beats_the_flag_a_foreign_launcher_wrote() -> None:
    environ = {"DEEPSEEK_TGI_KV_CACHE_DTYPE": "int8"}
    got = read(ShardConfig, PROGRAM, ["m", "--kv-cache-dtype", "fp8_e5m2"], environ)
    assert got.config.kv_cache_dtype == "int8"
    assert got.origins["kv_cache_dtype"] == "environment DEEPSEEK_TGI_KV_CACHE_DTYPE"


@pytest.mark.parametrize("level", ["OFF", "ERROR", "WARN", "INFO", "DEBUG", "TRACE"])
def test_all_levels_of_the_launcher_are_known(level: str) -> None:
    config = read(ShardConfig, PROGRAM, ["m", "--logger-level", level], {}).config
    assert config.logger_level == level.lower()


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        launcher("--help")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert [flag for flag in TGI_FLAGS if flag not in shown] == []


def test_help_says_which_values_an_option_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launcher("--help")
    shown = " ".join(capsys.readouterr().out.split())
    for flag, names in (
        ("--quantize", "awq, compressed-tensors, eetq, exl2, gptq, marlin, bitsandbytes, bitsandbytes-nf4"),
        ("--dtype", "float16, bfloat16, float32"),
        ("--usage-stats", "on, off, no-stack"),
        ("--router", "auto, tgi, embedded"),
    ):
        about = shown.partition(f" {flag} ")[2].partition(" --")[0]
        assert f"one of {names}" in about.replace("- ", "-"), flag
    assert "--max-best-of N " in shown
    assert "--num-shard N " in shown


def test_a_number_without_a_limit_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match=r"'0', expected a whole number of at least 1$"):
        launcher("--max-concurrent-requests", "0")


def test_an_option_like_no_other_points_to_help() -> None:
    with pytest.raises(ConfigError, match=r"unknown option '--zzz'; see \S+ --help$"):
        launcher("--zzz", "1")
    with pytest.raises(ConfigError, match=r"unexpected argument 'stray'; see \S+ --help$"):
        launcher("stray")


def test_every_format_of_the_cache_can_be_asked_for() -> None:
    from deepseek_tgi.kv.layout import KVMode

    assert {mode.value for mode in KVMode} < set(KV_DTYPES)
