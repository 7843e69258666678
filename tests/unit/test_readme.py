"""README against the code: what it says of bytes, options, folders and messages is what the code does."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.published import PARAMETERS, V2_LITE

from deepseek_tgi.adapters.cache_layout import cache_layout, cache_modes
from deepseek_tgi.adapters.model_config import FAMILIES, LatentAttention, ModelConfig, read_model_config
from deepseek_tgi.adapters.tgi_needs import cache_bytes_per_token
from deepseek_tgi.config import OWN_ENVIRONMENT, LauncherConfig
from deepseek_tgi.kv.layout import KVMode
from deepseek_tgi.launcher.plan import make_plan
from deepseek_tgi.launcher.plan_text import plan_lines
from deepseek_tgi.options import flag_of, options_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def after(mark: str) -> str:
    assert README.count(f"<!-- {mark} -->") == 1, f"README has no <!-- {mark} -->"
    return README.partition(f"<!-- {mark} -->")[2]


def table(mark: str) -> list[list[str]]:
    """Cells of the table that follows the mark, heading left out."""
    lines = after(mark).strip().splitlines()
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def code_block(mark: str) -> str:
    match = re.match(r"\s*```\w*\n(.*?)```", after(mark), re.DOTALL)
    assert match, f"no code block follows {mark}"
    return match[1]


def test_second_command_installs_prepares_and_tests() -> None:
    steps = [step.strip() for step in code_block("second command").split("&&")]
    assert steps == ["pip install -c constraints.txt -e '.[test]'", "python -m tests.peers", "python -m pytest"]


@pytest.mark.parametrize("row", table("kv table"), ids=lambda row: row[0])
def test_kv_bytes_are_the_layouts(row: list[str], tmp_path: Path) -> None:
    config = published(PARAMETERS[row[0]][0], tmp_path)

    def size(mode: KVMode) -> str:
        return str(cache_layout(config, mode, 16).bytes_per_token) if mode in cache_modes(config) else "-"

    modes = (KVMode.FLOAT32, KVMode.BFLOAT16, KVMode.FP8, KVMode.INT8, KVMode.INT4)
    assert row[2:] == [*map(size, modes), str(cache_bytes_per_token(config))]
    assert size(KVMode.FLOAT16) == size(KVMode.BFLOAT16)
    spec, layers = config.attention, config.num_hidden_layers
    if isinstance(spec, LatentAttention):
        assert row[1] == f"{layers} x latent of {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
    else:
        assert row[1] == f"{layers} x {spec.num_key_value_heads} heads of {spec.head_dim}"


def published(fields: dict[str, object], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_model_config(folder)


def test_every_family_is_in_the_table_of_what_is_supported() -> None:
    shown = README.partition("## What is supported")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([\w-]+)` \|", shown, re.MULTILINE)) - {"model_type", "quant_method"}
    assert named == set(FAMILIES) | {"awq", "gptq", "fp8", "compressed-tensors"}


def test_the_plan_that_is_shown_is_what_info_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    folder = tmp_path / "DeepSeek-V2-Lite-AWQ"
    folder.mkdir()
    published(V2_LITE | {"quantization_config": quantised}, folder)
    monkeypatch.chdir(tmp_path)
    config = LauncherConfig(model_id=folder.name, num_shard=2, kernels="native", dtype="bfloat16")
    printed = [told(line) for line in plan_lines(make_plan(config, Memory()))]
    shown = [told(line) for line in code_block("plan").splitlines() if line != "…"]
    assert [line for line in shown if line not in printed] == []


def told(line: str) -> str:
    """A line of a plan without what the kernels' packing decides: bytes in memory, and tokens in what they leave."""
    measured = line.startswith(("rank ", "all ranks", *(mode.value for mode in KVMode)))
    return line.rpartition("  ")[0].rstrip() if measured else line


class Memory:
    """The machine that README shows."""

    def available_bytes(self) -> int:
        return 23_422_283_776

    def resident_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


def test_options_table_names_every_environment_name_of_ours() -> None:
    assert {row[1].strip("`") for row in table("options table")} == OWN_ENVIRONMENT


def test_options_table_names_real_flags() -> None:
    flags = {row[0].strip("`") for row in table("options table")} - {""}
    known = {flag_of(name) for name, spec in options_of(LauncherConfig).items() if spec.flag}
    assert flags <= known


def test_folders_of_the_map_exist_and_none_is_missing() -> None:
    shown = README.partition("## The map")[2].partition("```")[2].partition("```")[0]
    tops = re.findall(r"^([\w./]+)/ ", shown, re.MULTILINE)
    assert [name for name in tops if not (ROOT / name).is_dir()] == []
    inner = set(re.findall(r"^  (\w+)/ ", shown, re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "deepseek_tgi").glob("*/__init__.py")}
    assert packages <= inner


def joined_literals() -> str:
    """All source text with neighbouring string literals run together, so that a message reads as it prints."""
    files = [path for folder in ("deepseek_tgi", "adapters", "probes") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r"\"\s*\n\s*f?\"", "", text)


@pytest.mark.parametrize("row", table("troubleshooting"), ids=lambda row: row[0][:40])
def test_quoted_messages_are_in_the_code(row: list[str]) -> None:
    source = joined_literals()
    for part in re.split("…", row[0].strip("`")):
        words = part.strip()
        assert words in source, f"no message of ours says {words!r}"


def test_backend_example_keeps_the_rules(tmp_path: Path) -> None:
    (tmp_path / "my_backend.py").write_text(code_block("backend example"))
    done = subprocess.run(
        [sys.executable, "-m", "deepseek_tgi.cli", "check-backend", "my_backend:CountingAdapter"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases hold" in done.stdout.splitlines()[-1]
