"""The launcher as a process, with stub shards and a shell script as TGI's router: order, signals, deaths, orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepseek_tgi.launcher.main import StopSignals
from deepseek_tgi.probes import exec_probe

STUB = str(Path(__file__).parents[2] / "stub_launcher.py")
ROUTER = """#!/bin/sh
echo "router starts with $*"
trap 'echo "router ends"; exit 0' TERM
[ -z "$ROUTER_DEAF" ] || trap '' TERM
while [ -z "$ROUTER_EXIT" ]; do sleep 0.05; done
echo "router gives up" >&2
exit $ROUTER_EXIT
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launcher:
    """One launcher, its output in a file."""

    def __init__(self, folder: Path, argv: list[str], environ: dict[str, str]) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.record = folder / "record"
        command = [sys.executable, STUB, "--backend", "deepseek-quant", "--model-id", str(folder / "model")]
        command += ["--hostname", "127.0.0.1", "--prometheus-port", "0", "--master-port", str(unused_port())]
        command += ["--shard-uds-path", str(folder / "s"), *argv]
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PATH": path, "STUB_RECORD": str(self.record), **environ},
                start_new_session=True,
            )

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        def seen() -> bool:
            assert self.process.poll() is None or text in self.words(), self.words()
            return text in self.words()

        until(seen, f"{text!r} in the log")

    def children(self) -> list[int]:
        """Every process below the launcher."""
        found, frontier = [], [self.process.pid]
        while frontier:
            pid = frontier.pop()
            try:
                below = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            except OSError:
                continue
            found += below
            frontier += below
        return found

    def child(self, words: str) -> int:
        """The child whose command line holds `words`."""

        def find() -> int | None:
            for pid in self.children():
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if words in line and "guard.py" not in line:
                    return pid
            return None

        found: int = until(find, f"a child with {words!r}")
        return found


Launch = Callable[..., Launcher]


@pytest.fixture
def launch(tmp_path: Path, free_port: int) -> Iterator[Launch]:
    """Starts a launcher; at the end nothing of it may be left, whatever the test did."""
    (tmp_path / "model").mkdir()
    (tmp_path / "bin").mkdir()
    router = tmp_path / "bin" / "text-generation-router"
    router.write_text(ROUTER)
    router.chmod(0o755)
    started: list[Launcher] = []

    def make(*argv: str, **environ: str) -> Launcher:
        port = [] if "--port" in argv else ["--port", str(free_port)]
        started.append(Launcher(tmp_path, [*port, *argv], environ))
        return started[-1]

    yield make
    for launcher in started:
        children = launcher.children()
        launcher.process.kill()
        launcher.process.wait()
        until(lambda: not any(map(alive, children)), "all children gone")  # noqa: B023 - called at once


def test_all_start_in_order_and_end_in_order(launch: Launch) -> None:
    launcher = launch("--num-shard", "2")
    launcher.wait_for("router starts with")
    children = launcher.children()
    assert len(children) >= 3
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(20) == 0
    words = launcher.words()
    order = ["Starting check and download", "Starting shard rank=0", "Starting shard rank=1", "Shard ready"]
    order += ["router starts with", "Terminating router", "router ends", "Terminating shard 0", "Terminating shard 1"]
    places = [words.index(text) for text in order]
    assert places == sorted(places)
    assert not any(map(alive, children))
    assert sorted(path.name for path in launcher.folder.iterdir()) == ["bin", "log", "model", "record"]


def test_children_are_called_as_tgi_calls_them(launch: Launch) -> None:
    launcher = launch("--max-total-tokens", "512", "--kv-cache-dtype", "int8", "--kv-memory", "1MiB", LOG_LEVEL="info")
    launcher.wait_for("router starts with")
    calls = [json.loads(line) for line in launcher.record.read_text().splitlines()]
    assert [call["argv"][0] for call in calls] == ["download-weights", "serve"]
    assert calls[1]["argv"][1] == str(launcher.folder / "model")
    env = calls[1]["env"]
    assert "LOG_LEVEL" not in env
    assert (env["RANK"], env["MAX_TOTAL_TOKENS"], env["DEEPSEEK_TGI_KV_CACHE_DTYPE"]) == ("0", "512", "int8")
    assert env["DEEPSEEK_TGI_KV_MEMORY"] == "1048576"
    assert {"PREFIX_CACHING", "ATTENTION"} <= env.keys()
    assert f"--master-shard-uds-path {launcher.folder}/s-0 --tokenizer-name {launcher.folder}/model" in launcher.words()


def test_behind_tgis_router_each_rank_answers_probes_itself(launch: Launch) -> None:
    port = free_port_pair()
    launcher = launch("--num-shard", "2", "--probe-port", str(port))
    launcher.wait_for("router starts with")
    assert f"--probe-port {port}" not in launcher.words(), "TGI's router knows no such option"
    for rank in range(2):
        statuses = [exec_probe.ask(("127.0.0.1", port + rank), path, 5.0)[0] for path in ("/livez", "/readyz")]
        assert statuses == [200, 503], "this router never warms up"


def free_port_pair() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def test_a_weights_folder_is_what_all_children_read(launch: Launch) -> None:
    launcher = launch("--weights-cache-override", "elsewhere")
    launcher.wait_for("router starts with")
    calls = [json.loads(line) for line in launcher.record.read_text().splitlines()]
    assert [call["argv"][1] for call in calls] == ["elsewhere", "elsewhere"]
    assert "--tokenizer-name elsewhere" in launcher.words()


def test_shard_lines_come_out_as_json(launch: Launch) -> None:
    launcher = launch("--json-output")
    launcher.wait_for("router starts with")
    lines = [line for line in launcher.words().splitlines() if line.startswith("{")]
    parsed = [json.loads(line) for line in lines]
    assert all({"timestamp", "level", "fields", "target"} <= line.keys() for line in parsed)
    assert any("listens on" in line["fields"]["message"] for line in parsed)


@pytest.mark.parametrize(
    ("victim", "words"), [("stub_shard.py serve", "Shard 0 failed"), ("text-generation-router", "Router failed")]
)
def test_a_killed_child_ends_everything(victim: str, words: str, launch: Launch) -> None:
    launcher = launch()
    launcher.wait_for("router starts with")
    children = launcher.children()
    os.kill(launcher.child(victim), signal.SIGKILL)
    assert launcher.process.wait(20) == 1
    assert f"{words}: ended with signal SIGKILL" in launcher.words()
    assert not any(map(alive, children))


def test_a_router_that_ends_by_itself_ends_everything(launch: Launch) -> None:
    launcher = launch(ROUTER_EXIT="5")
    assert launcher.process.wait(20) == 5
    assert "router gives up" in launcher.words()
    assert "Router failed: ended with code 5" in launcher.words()


def test_a_shard_that_cannot_start_is_shown_with_its_stderr_and_its_code(launch: Launch) -> None:
    launcher = launch("--num-shard", "2", STUB_FAIL="config.json: vocab_size is missing")
    assert launcher.process.wait(20) == 3
    assert "cannot start: ended with code 3; its standard error:\n  CheckpointError: config.json" in launcher.words()
    assert "router starts with" not in launcher.words()


def test_a_failed_download_ends_it_before_any_shard(launch: Launch) -> None:
    launcher = launch(STUB_DOWNLOAD_FAIL="no such model on the hub")
    assert launcher.process.wait(20) == 3
    assert "no such model on the hub" in launcher.words()
    assert "Starting shard" not in launcher.words()


def test_a_parent_that_ignores_its_children_changes_nothing(launch: Launch) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inherited by the launcher
    try:
        launcher = launch()
    finally:
        signal.signal(signal.SIGCHLD, before)
    launcher.wait_for("router starts with")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(20) == 0


def test_a_signal_while_shards_load_stops_them(launch: Launch) -> None:
    launcher = launch(STUB_LOAD_S="60")
    launcher.child("stub_shard.py serve")
    launcher.wait_for("loading")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(20) == 0


def test_another_launchers_shard_is_not_taken_for_ours(launch: Launch) -> None:
    launcher = launch(STUB_LOAD_S="60")
    launcher.child("stub_shard.py serve")
    launcher.wait_for("loading")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(launcher.folder / "s-0"))
        other.listen()
        assert launcher.process.wait(20) == 5
        assert (launcher.folder / "s-0").exists()
    assert "in use by a running shard" in launcher.words()
    assert "router starts with" not in launcher.words()


def test_a_deaf_router_is_killed_after_the_timeout(launch: Launch) -> None:
    launcher = launch("-g", "1", ROUTER_DEAF="1")
    launcher.wait_for("router starts with")
    started = time.monotonic()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(20) == 0
    assert 0.9 < time.monotonic() - started < 10
    assert "router did not end in time: killed" in launcher.words()


def test_a_second_signal_ends_it_at_once(launch: Launch) -> None:
    launcher = launch("-g", "60", ROUTER_DEAF="1")
    launcher.wait_for("router starts with")
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_for("Terminating router")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(10) == 128 + signal.SIGINT
    assert "router was asked to hurry: killed" in launcher.words()


def test_a_signal_heard_twice_is_one_request() -> None:
    signals = StopSignals()
    for _ in range(2):
        signals.note(signal.SIGTERM, None)
    assert (signals.stopping(), signals.hurry()) == (True, False)
    signals.note(signal.SIGINT, None)
    assert signals.hurry()


def test_a_killed_launcher_leaves_nobody(launch: Launch) -> None:
    launcher = launch("--num-shard", "2", ROUTER_DEAF="1")
    launcher.wait_for("router starts with")
    children = launcher.children()
    assert len(children) >= 3
    launcher.process.kill()
    launcher.process.wait()
    until(lambda: not any(map(alive, children)), "no orphan", 5.0)


def test_options_that_do_nothing_are_named(launch: Launch) -> None:
    launcher = launch("--speculate", "2", "--admin-token", "t", "--drain-timeout", "9", LORA_ADAPTERS="a=b")
    launcher.wait_for("Starting shard")
    named = "environment LORA_ADAPTERS, flag --speculate, flag --admin-token, flag --drain-timeout"
    assert f"Without effect on this backend behind TGI's own router: {named}" in launcher.words()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--backend", "nope"], 2, "unknown backend 'nope'; known: deepseek-quant"),
        (["--max-input-tokens", "9", "--max-total-tokens", "9"], 2, "expected less than --max-total-tokens"),
        (["--shard-uds-path", "/no/such/folder/s"], 5, "is not a folder"),
        (["--shard-uds-path", "/tmp/" + "x" * 110], 5, "a unix socket allows 107"),
        (["--router", "tgi", "--port", "1", "--hostname", "192.0.2.1"], 5, "cannot be bound"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    argv: list[str], code: int, message: str, launch: Launch
) -> None:
    launcher = launch(*argv)
    assert launcher.process.wait(20) == code
    assert message in launcher.words()
    assert "Traceback" not in launcher.words()
    assert not launcher.record.exists()
