"""`--num-shard 2` from the command line to HTTP: the small real model, a rank that dies, models that cannot be cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from engine_driver import Driver
from launched_server import LaunchedServer, alive, await_true, free_port, launcher_command, run_to_the_end
from ranks import V2
from shard_client import serve_argv, serve_environment

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import SamplingParams, StopRule

PROMPT = "Once upon a time there was a lighthouse. Its keeper"
NEW = 64


def test_the_real_model_says_on_two_ranks_what_it_says_on_one_and_ends_when_one_is_killed(
    tmp_path: Path, real_model_dir: Path
) -> None:
    """Nine query heads over three key heads: the ranks have six and three."""
    lengths = ("--max-total-tokens", "256", "--max-input-tokens", "128", "--max-batch-prefill-tokens", "128")
    limits = ("--num-shard", "2", *lengths, "--dtype", "float32")
    server = LaunchedServer.start(real_model_dir, tmp_path, limits)
    try:
        greedy = server.generate(PROMPT, max_new_tokens=NEW)["details"]["tokens"]
        drawn = server.generate(PROMPT, max_new_tokens=NEW, do_sample=True, seed=11)["details"]["tokens"]
        below = server.children()
        shards = {int(line.split("RANK=")[1][0]): pid for pid, line in ranks_below(below).items()}
        os.kill(shards[1], signal.SIGKILL)
        assert server.wait(30) == 1
        assert "Shard 1 failed: ended with signal SIGKILL" in server.words()
        await_true(lambda: not any(alive(pid) for pid in below), f"no orphan of {below}")
        assert "Traceback" not in server.words()
    finally:
        server.stop()
    alone = QuantizedModelAdapter.get_model(str(real_model_dir), options=LoadOptions(dtype="float32"))
    driver = Driver(alone, max_prefill=128, max_total=256)
    expected = driver.run(
        driver.request(PROMPT, stop=StopRule(NEW)),
        driver.request(PROMPT, stop=StopRule(NEW), sampling=SamplingParams(do_sample=True, seed=11)),
    )
    assert [[token["id"] for token in tokens] for tokens in (greedy, drawn)] == [found.ids for found in expected]
    assert len(greedy) == NEW


def ranks_below(children: dict[int, str]) -> dict[int, str]:
    """The shards among `children`, each with its rank as the environment has it."""
    found = {}
    for pid, line in children.items():
        if " serve " in line and "uds-path" in line and "guard.py" not in line:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found[pid] = next(v.decode() for v in variables if v.startswith(b"RANK="))
    return found


def write_config(folder: Path, group_size: int) -> Path:
    """A model of which only the config is there: no tensor can be read, none may be missed."""
    quantization = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(V2 | {"quantization_config": quantization}))
    return folder


def test_the_launcher_refuses_at_once_what_cannot_be_cut(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", 64)
    argv = [*launcher_command(), "--backend", "deepseek-quant", "--model-id", str(model), "--num-shard", "4"]
    argv += ["--port", str(free_port()), "--master-port", str(free_port()), "--shard-uds-path", str(tmp_path / "s")]
    done = run_to_the_end([*argv, "--router", "embedded"], cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "num_shard: got 4, expected 1 or 2" in said
    assert "model.layers.0.self_attn.o_proj has 128 inputs of 4 heads in groups of 64" in said
    assert "Starting shard" not in said


def test_a_shard_refuses_alone_before_it_looks_for_tensors_or_other_ranks(tmp_path: Path) -> None:
    """As TGI's own launcher would start it: nobody has checked before, and no other rank will come."""
    model = write_config(tmp_path / "model", 64)
    environment = serve_environment({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": str(free_port())})
    done = subprocess.run(
        [sys.executable, "-m", "deepseek_tgi.server", *serve_argv(str(model), tmp_path / "s", ("--sharded",))],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    states = [json.loads(line)["text"] for line in done.stdout.splitlines() if "state" in line]
    assert any(state.startswith("state loading -> failed (num_shard: got 4") for state in states)
    assert not any("ready" in state for state in states)
    assert "model.layers.1.mlp.experts.0.down_proj has 128 inputs in groups of 64" in done.stderr


def test_a_rendezvous_port_in_use_is_found_before_anything_starts(tmp_path: Path, tiny_model_dir: Path) -> None:
    argv = [*launcher_command(), "--backend", "deepseek-quant", "--model-id", str(tiny_model_dir), "--num-shard", "2"]
    argv += ["--port", str(free_port()), "--shard-uds-path", str(tmp_path / "s"), "--router", "embedded"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_to_the_end([*argv, "--master-port", str(port)], cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert f"--master-port {port}: localhost:{port} is in use by another program" in done.stdout + done.stderr
