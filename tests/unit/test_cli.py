"""The command line: help, exit codes, what it prints; nothing heavy at start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_tgi import __version__, cli
from deepseek_tgi.launcher import main as launcher

COMMANDS = (
    *("quickstart", "launch", "info", "shim", "download-weights", "import-gguf", "quantize", "backends"),
    *("check-backend", "tune"),
)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert [name for name in COMMANDS if name not in shown] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert "example:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"deepseek-tgi {__version__}\n"


def test_backends_shows_origin_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("deepseek-quant "))
    assert line.split()[1:3] == ["deepseek-tgi", __version__]


def test_info_shows_values_origins_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_BEST_OF", "3")
    assert cli.main(["info", "--port", "4000", "--api-key", "very-secret-key"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in shown.partition("\n\n")[0].splitlines()}
    assert lines["--port"] == ["4000", "flag", "--port"]
    assert lines["--max-best-of"] == ["3", "environment", "MAX_BEST_OF"]
    assert lines["--max-stop-sequences"] == ["4", "default"]
    assert {"LOG_LEVEL", "DEEPSEEK_TGI_OPENAI_REASONS"} < lines.keys()  # these have no flag
    assert "very-secret-key" not in shown


def test_info_tells_the_plan_of_a_model(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    assert cli.main(["info", "--model-id", str(tiny_model_dir), "--kv-cache-dtype", "int8"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell] for row in rows}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    elements = config["num_hidden_layers"] * config["num_key_value_heads"] * 2 * width
    # An int8 element is one byte; scale and zero of K and of V are two bytes each, per token, layer and head.
    scales = config["num_hidden_layers"] * config["num_key_value_heads"] * 2 * 2 * 2
    assert cells["float32"][0] == f"{elements * 4:,}"
    assert cells["int8 (in use)"][0] == f"{elements + scales:,}"
    assert "awq int4 g32" in cells["model.layers.0-1.mlp.down_proj"]


def test_info_for_programs_is_one_object(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json", "--model-id", str(tiny_model_dir), "--api-key", "very-secret-key"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown)
    assert found["model"]["num_shard"] == 1
    assert found["options"]["--model-id"] == {"value": str(tiny_model_dir), "from": "flag --model-id"}
    assert "very-secret-key" not in shown
    assert cli.main(["info", "--json"]) == 0
    bundled = json.loads(capsys.readouterr().out)["model"]
    assert bundled["model_type"] == "deepseek_v3", "the bundled model is the default"


@pytest.mark.parametrize(
    ("fields", "argv", "code"),
    [({"model_type": "deepseek_v32"}, [], 4), ({}, ["--num-shard", "17"], 2), ({"kv_lora_rank": None}, [], 3)],
    ids=["unsupported", "shards", "unreadable"],
)
def test_info_refuses_with_the_codes_of_loading(
    fields: dict[str, object], argv: list[str], code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from oracles.published import V2_LITE

    (tmp_path / "config.json").write_text(json.dumps(V2_LITE | fields))
    assert cli.main(["info", "--model-id", str(tmp_path), *argv]) == code
    assert capfd.readouterr().err.count("deepseek-tgi: error: ") == 1


def test_a_plan_from_a_config_alone_is_quick(tmp_path: Path) -> None:
    """The largest model there is, in CPU time, the best of three; a busy machine must not decide."""
    from oracles.published import V3

    (tmp_path / "config.json").write_text(json.dumps(V3))
    code = """
import io, json, sys, time
from contextlib import redirect_stdout
start = time.process_time()
from deepseek_tgi import cli
with redirect_stdout(io.StringIO()):
    code = cli.main(["info", "--model-id", sys.argv[1], "--num-shard", "8"])
print(json.dumps([code, time.process_time() - start, sorted({"torch", "numpy", "transformers"} & sys.modules.keys())]))
"""
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    assert [(status, heavy) for status, _, heavy in runs] == [(0, [])] * 3
    assert min(seconds for _, seconds, _ in runs) < 3.0


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["download-weights", "/no/such/folder"], 3, "/no/such/folder"),
        (["check-backend", "nope"], 2, "unknown backend 'nope'"),
        (["info", "--prot", "1"], 2, "did you mean --port"),
        (["launch", "--model-id", "/x", "--port", "-1"], 2, "--port"),
    ],
)
def test_errors_are_one_message_and_a_code(
    argv: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == code
    shown = capfd.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("variable", "argv"), [("", ["--backend", "deepseek-quant", "--port", "1"]), ("other", ["--port", "1"])]
)
def test_launch_takes_an_empty_backend_variable_as_not_set(
    variable: str, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSEEK_TGI_BACKEND", variable)
    called: list[list[str]] = []
    monkeypatch.setattr(launcher, "main", called.append)
    cli.main(["launch", "--port", "1"])
    assert called == [argv]


def test_a_closed_reader_is_no_error() -> None:
    shell = f"{sys.executable} -m deepseek_tgi.cli info | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("port", ["0", "70000", "-1", "x", "9" * 5000])
def test_quickstart_names_a_port_that_cannot_be(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["quickstart", f"--port={port}"])
    assert left.value.code == 2
    assert "expected a whole number from 1 to 65535" in capsys.readouterr().err


def test_a_program_names_itself_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--max-total-token", "3"]) == 2
    assert launcher.main(["--backend", "deepseek-quant", "--max-total-token", "3"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("deepseek-tgi: error: info: unknown option '--max-total-token'; did you mean")
    assert second.startswith("text-generation-launcher: error: unknown option '--max-total-token'; did you mean")


def test_a_stopped_preparation_takes_its_unfinished_files_with_it(tmp_path: Path) -> None:
    code = """
import sys, tempfile, time
from deepseek_tgi import cli
from deepseek_tgi.convert import small_model

def ensure(progress):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("working", flush=True)
        time.sleep(60)

small_model.ensure_small_model = ensure
sys.exit(cli.main(["download-weights", "smollm2"]))
"""
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        assert list(tmp_path.iterdir()) != []
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
