"""A disk that fills while a checkpoint is written: one error with exit code 5, and nothing half-done stays."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from builders import tiny_checkpoint
from launched_server import run_to_the_end
from oracles import gguf as gguf_oracle

RESOURCE = 5
DISK_BYTES = 192 * 1024
"""Less than either output, more than its small files."""

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of half a megabyte in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.float32)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf_oracle.open_writer(path, CONFIG)
    gguf_oracle.add_byte_level_vocabulary(writer, "gpt-2", ["h e", "l l"])
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    gguf_oracle.add_weights(writer, weights, CONFIG, gguf.GGMLQuantizationType.F32)
    gguf_oracle.finish(writer)
    return path


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama in float16."""
    return tiny_checkpoint(tmp_path_factory.mktemp("dense") / "model", "llama").path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of `DISK_BYTES`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = run_to_the_end(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)])
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, DISK_BYTES))


def write_to(command: str, source: Path, out: Path, **how: Any) -> None:
    """Run the command, which must fail in the documented way and leave `out`'s folder as it was."""
    before = set(os.listdir(out.parent))
    argv = [sys.executable, "-m", "deepseek_tgi.cli", command, str(source), str(out)]
    done = run_to_the_end(argv, timeout_s=120, **how)
    assert done.returncode == RESOURCE, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert str(out.parent) in done.stderr
    assert set(os.listdir(out.parent)) == before


@pytest.mark.parametrize("command", ["import-gguf", "quantize"])
def test_a_full_disk_is_one_error_and_leaves_nothing(
    small_disk: Path, gguf_file: Path, dense_model: Path, command: str
) -> None:
    write_to(command, gguf_file if command == "import-gguf" else dense_model, small_disk / "out")


@pytest.mark.parametrize("command", ["import-gguf", "quantize"])
def test_a_file_size_limit_is_one_error_and_leaves_nothing(
    tmp_path: Path, gguf_file: Path, dense_model: Path, command: str
) -> None:
    source = gguf_file if command == "import-gguf" else dense_model
    write_to(command, source, tmp_path / "out", preexec_fn=limit_file_size)
