"""The stock way round: a launcher that is not ours finds `text-generation-server` on PATH and runs our shard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched_server import alive, await_true, descendants, run_to_the_end
from router_model import Ask, BlockBook, RouterModel
from shard_client import LOG_LEVELS, ShardClient, serve_argv, serve_environment
from tiny_tokenizer import build_tokenizer


class StockLauncher:
    """What TGI's launcher does with one rank, as the contract describes it: no line of it knows our package."""

    def __init__(self, path_entry: Path, model: Path, stem: Path) -> None:
        self._model = model
        self._stem = stem
        path = os.pathsep.join([str(path_entry), os.environ.get("PATH", "")])
        self._environment = serve_environment({"PATH": path, "LORA_ADAPTERS": "", "UNHEARD_OF": "1"})
        self._environment.pop("LORA_ADAPTERS")
        self._program = shutil.which("text-generation-server", path=path)
        self.levels: list[tuple[str, str]] = []

    def download(self) -> subprocess.CompletedProcess[str]:
        argv = ["download-weights", str(self._model), "--extension", ".safetensors", "--logger-level", "INFO"]
        argv += ["--json-output", "--merge-lora"]
        assert self._program is not None
        return run_to_the_end([self._program, *argv], env=self._environment)

    def start(self) -> None:
        """Remove an old socket, spawn, and wait for the path as the launcher does."""
        self.socket = Path(f"{self._stem}-0")
        self.socket.unlink(missing_ok=True)
        assert self._program is not None
        self.shard = subprocess.Popen(
            [
                self._program,
                *serve_argv(str(self._model), self._stem, ["--quantize", "awq", "--max-input-tokens", "480"]),
            ],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + 120
        while not self.socket.exists():
            assert self.shard.poll() is None, self.shard.stderr and self.shard.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _read(self) -> None:
        """32 768 bytes at a time, split on newlines; every piece must parse."""
        assert self.shard.stdout is not None
        descriptor = self.shard.stdout.fileno()
        while piece := os.read(descriptor, 32768):
            for line in filter(None, piece.split(b"\n")):
                record = json.loads(line)
                self.levels.append((record["record"]["level"]["name"], record["text"]))

    def end(self) -> None:
        if self.shard.poll() is None:
            self.shard.kill()
        self.shard.wait()
        self._reader.join(5)
        for stream in (self.shard.stdin, self.shard.stdout, self.shard.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def launcher(tmp_path: Path, tiny_model_dir: Path) -> Iterator[StockLauncher]:
    """With a PATH whose first folder `deepseek-tgi shim` wrote."""
    folder = tmp_path / "bin"
    command = Path(sys.executable).with_name("deepseek-tgi")
    argv = [str(command)] if command.exists() else [sys.executable, "-m", "deepseek_tgi.cli"]
    done = run_to_the_end([*argv, "shim", str(folder)])
    assert done.returncode == 0, done.stderr
    assert os.access(folder / "text-generation-server", os.X_OK)
    stock = StockLauncher(folder, tiny_model_dir, tmp_path / "tgi")
    yield stock
    if hasattr(stock, "shard"):
        stock.end()


def test_stock_launcher_runs_our_shard_from_download_to_shutdown(launcher: StockLauncher) -> None:
    download = launcher.download()
    assert download.returncode == 0, download.stderr
    launcher.start()
    client = ShardClient(launcher.socket)
    assert client.discover() == [f"unix://{launcher.socket}"]
    client.clear()
    info: Any = client.info()
    limits = client.warmup(128, 480, 512)
    tokenizer = build_tokenizer()
    book = BlockBook(limits.max_supported_total_tokens // info.block_size, info.block_size)
    router = RouterModel(client, book, lambda t, s: tokenizer.encode(t, add_special_tokens=s).ids)
    outcomes = router.run(Ask("from a stranger", 5), Ask("to another", 7))
    assert [len(o.ids) for o in outcomes] == [5, 7]
    client.close()
    started = time.monotonic()
    launcher.shard.terminate()
    launcher.shard.wait(5)
    assert time.monotonic() - started < 5
    launcher._reader.join(5)
    assert launcher.levels, "not a single log line"
    assert {level for level, _ in launcher.levels} <= LOG_LEVELS
    assert not [text for level, text in launcher.levels if level in ("ERROR", "CRITICAL")]


def test_shard_ends_when_the_stock_launcher_dies(launcher: StockLauncher) -> None:
    launcher.start()
    below = [launcher.shard.pid, *descendants(launcher.shard.pid)]
    assert launcher.shard.stdin is not None
    launcher.shard.stdin.close()  # what a dead launcher's pipe looks like
    await_true(lambda: not any(map(alive, below)), "the shard and its children leave", 15)


def test_shim_says_what_it_would_hide_instead_of_overwriting_it(tmp_path: Path) -> None:
    theirs = tmp_path / "text-generation-server"
    theirs.write_text("#!/bin/sh\necho theirs\n")
    theirs.chmod(0o755)
    done = run_to_the_end([sys.executable, "-m", "deepseek_tgi.cli", "shim", str(tmp_path)])
    assert done.returncode != 0
    assert str(theirs) in done.stderr
    assert theirs.read_text() == "#!/bin/sh\necho theirs\n"
