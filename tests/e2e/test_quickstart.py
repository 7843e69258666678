"""`deepseek-tgi quickstart`: one command, a real model, a sensible answer, examples that work, a clean end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from launched_server import alive, await_true, descendants, free_port


def test_quickstart_answers_and_its_examples_work(tmp_path: Path) -> None:
    output: list[bytes] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "deepseek_tgi.cli", "quickstart", "--port", str(free_port())],
        cwd=tmp_path,
        env={**os.environ, "LOG_LEVEL": "info", "LORA_ADAPTERS": "a=b"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=output.extend, args=(process.stdout,), daemon=True)
    reader.start()

    def said() -> str:
        return b"".join(output).decode()

    try:
        await_true(lambda: process.poll() is not None or said().count("curl") == 2, "both examples", 120)
        assert "> What is the capital of France?" in said()
        assert "Paris" in said().partition("France?")[2]
        assert "WARN" in said().partition("ready.")[2].partition(">")[0], "an option without effect is told"
        for command in re.findall(r"^  (curl .*)$", said(), re.MULTILINE):
            answer = subprocess.run(
                ["sh", "-c", f"{command} -sS"], capture_output=True, text=True, check=True, timeout=60
            )
            assert "Paris" in answer.stdout
        below = descendants(process.pid)
        assert len(below) >= 3
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert not any(map(alive, below))
        await_true(lambda: "Stopping; a running request may finish" in said(), "the last word", 5)
        assert "killed" not in said()
    finally:
        process.kill()
        process.wait()
        reader.join(5)
        process.stdout.close()


def test_a_port_in_use_is_told_before_anything_else(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "deepseek_tgi.cli", "quickstart", "--port", port]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert done.returncode == 5
    assert f"--port {port}" in done.stderr


def test_a_model_that_cannot_be_served_shows_the_servers_last_words(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "deepseek_tgi.cli",
        "quickstart",
        "--port",
        str(free_port()),
        "--model-id",
        str(tmp_path),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert done.returncode == 3
    assert "no *.safetensors" in done.stderr
