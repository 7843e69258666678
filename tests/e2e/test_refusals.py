"""Starts that cannot succeed: each ends soon, with the documented exit code and one error that names the cause."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launched_server import descendants, free_port, launcher_command, run_to_the_end
from shard_client import serve_argv, serve_environment

OPTION, CHECKPOINT, UNSUPPORTED, RESOURCE = 2, 3, 4, 5
QUICK_S, WITH_SHARD_S = 10.0, 60.0


def launch(model: Path | str, tmp_path: Path, *extra: str, limit_s: float = QUICK_S) -> tuple[int, str]:
    """Run the launcher to its end: exit status and everything it said."""
    argv = [*launcher_command(), "--backend", "deepseek-quant", "--model-id", str(model), "--router", "embedded"]
    argv += ["--shard-uds-path", str(tmp_path / "tgi"), "--hostname", "127.0.0.1"]
    if "--port" not in extra:
        argv += ["--port", str(free_port()), "--prometheus-port", str(free_port())]
    before, started = set(descendants(os.getpid())), time.monotonic()
    done = run_to_the_end([*argv, *extra], timeout_s=120, cwd=tmp_path)
    took = time.monotonic() - started
    said = done.stdout + done.stderr
    assert took < limit_s, f"{took:.1f} s to say: {said}"
    assert "Traceback" not in said, said
    assert not list(tmp_path.glob("tgi-*")), "a socket was left behind"
    assert not set(descendants(os.getpid())) - before, "a process was left behind"
    return done.returncode, said


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        (["--max-total-tokns", "5"], "--max-total-tokens"),
        (["--max-total-tokens", "many"], "many"),
        (["--max-input-tokens", "100", "--max-total-tokens", "100"], "max-input-tokens"),
        (["--max-input-tokens", "5", "--max-input-length", "5"], "max-input-length"),
        (["--kv-cache-dtype", "int3"], "int8"),
        (["--block-size", "17"], "16"),
        (["--validation-workers", "0"], "validation-workers"),
        (["--port", "70000"], "70000"),
        (["--backend", "deepseek-quannt"], "deepseek-quant"),
        (["--router", "nginx"], "embedded"),
        (["--dtype", "int4"], "bfloat16"),
        (["stray"], "stray"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, list) else None,
)
def test_a_wrong_flag_is_one_error_with_what_would_work(
    tmp_path: Path, tiny_model_dir: Path, extra: list[str], names: str
) -> None:
    status, said = launch(tiny_model_dir, tmp_path, *extra)
    assert status == OPTION, said
    assert names in said
    assert len([line for line in said.splitlines() if re.search("error", line, re.IGNORECASE)]) == 1, said


def test_a_port_in_use_is_found_before_anything_is_loaded(tmp_path: Path, tiny_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = launch(tiny_model_dir, tmp_path, "--port", str(port))
    assert status == RESOURCE, said
    assert str(port) in said


def test_a_socket_folder_that_is_missing_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    missing = tmp_path / "nowhere" / "tgi"
    status, said = launch(tiny_model_dir, tmp_path, "--shard-uds-path", str(missing), limit_s=WITH_SHARD_S)
    assert status == RESOURCE, said
    assert str(missing.parent) in said


Spoil = Callable[[Path], None]


def edit_config(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return spoil


def rewrite(name: str, content: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return spoil


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def header_beyond_the_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 90_000_000) + b"{}" + bytes(100))


def offsets_beyond_the_file(folder: Path) -> None:
    header = {"model.embed_tokens.weight": {"dtype": "F16", "shape": [320, 128], "data_offsets": [0, 2**50]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(1000))


def index_outside_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    names = {"model.embed_tokens.weight": "../elsewhere.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def one_tensor_short(folder: Path) -> None:
    """Rename a tensor in place: the file stays consistent, the model does not."""
    file = folder / "model.safetensors"
    name = b"model.layers.1.mlp.down_proj.qweight"
    file.write_bytes(file.read_bytes().replace(name, name.replace(b"mlp", b"plm"), 1))


def drop(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


BROKEN: dict[str, tuple[Spoil, int, str]] = {
    "unsupported model type": (edit_config(model_type="mamba2"), UNSUPPORTED, r"mamba2.*(llama|qwen)"),
    "no config": (drop("config.json"), CHECKPOINT, r"config\.json"),
    "config is no JSON": (rewrite("config.json", b'{"model_type": '), CHECKPOINT, r"config\.json"),
    "config is bytes": (rewrite("config.json", b"\xff\xfe\x00"), CHECKPOINT, r"config\.json"),
    "config is deep": (rewrite("config.json", b"[" * 100_000), CHECKPOINT, r"config\.json"),
    "config with a wrong type": (edit_config(hidden_size="128"), CHECKPOINT, r"hidden_size"),
    "config with a huge size": (edit_config(num_hidden_layers=10**9), CHECKPOINT, r"num_hidden_layers|layers"),
    "heads that do not divide": (edit_config(num_attention_heads=3), CHECKPOINT, r"heads|q_proj|shape"),
    "no tokenizer": (drop("tokenizer.json"), CHECKPOINT, r"tokenizer\.json"),
    "tokenizer is no JSON": (rewrite("tokenizer.json", b"{"), CHECKPOINT, r"tokenizer\.json"),
    "no weights": (drop("model.safetensors"), CHECKPOINT, r"safetensors"),
    "weights cut off": (cut_weights, CHECKPOINT, r"model\.safetensors"),
    "weights empty": (rewrite("model.safetensors", b""), CHECKPOINT, r"model\.safetensors"),
    "weights header huge": (huge_header, CHECKPOINT, r"model\.safetensors"),
    "weights header beyond the file": (header_beyond_the_file, CHECKPOINT, r"model\.safetensors"),
    "weights offsets beyond the file": (offsets_beyond_the_file, CHECKPOINT, r"model\.safetensors"),
    "index pointing outside": (index_outside_the_folder, CHECKPOINT, r"index\.json|elsewhere"),
    "one tensor missing": (one_tensor_short, CHECKPOINT, r"layers\.1\.mlp\.down_proj"),
    "a pickle instead of weights": (
        rewrite("model.safetensors", b"\x80\x04\x95cos\nsystem\n."),
        CHECKPOINT,
        "safetens",
    ),
}


@pytest.mark.parametrize(("spoil", "code", "names"), BROKEN.values(), ids=BROKEN)
def test_a_broken_model_folder_is_refused_by_the_shard_with_its_cause(
    tmp_path: Path, tiny_model_dir: Path, spoil: Spoil, code: int, names: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    spoil(model)
    done = serve_to_the_end(model, tmp_path)
    assert done[0] == code, done[1]
    assert re.search(names, done[1], re.DOTALL), done[1]


def serve_to_the_end(model: Path, tmp_path: Path, extra: Sequence[str] = ()) -> tuple[int, str]:
    """Run one shard that cannot start: exit status and stderr, which holds one error and no traceback."""
    argv = [sys.executable, "-m", "deepseek_tgi.server", *serve_argv(str(model), tmp_path / "tgi", extra)]
    done = run_to_the_end(argv, timeout_s=60, env=serve_environment({"OMP_NUM_THREADS": "1"}))
    assert "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not list(tmp_path.glob("tgi-*"))
    return done.returncode, done.stderr


@pytest.mark.parametrize("case", ["unsupported model type", "weights cut off"])
def test_the_launcher_passes_the_cause_on(tmp_path: Path, tiny_model_dir: Path, case: str) -> None:
    spoil, _, names = BROKEN[case]
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    spoil(model)
    status, said = launch(model, tmp_path, limit_s=WITH_SHARD_S)
    assert status != 0
    assert re.search(names, said, re.DOTALL), said


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    status, said = launch(tmp_path / "not-there", tmp_path, limit_s=WITH_SHARD_S)
    assert status != 0
    assert "not-there" in said
