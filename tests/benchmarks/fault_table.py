"""Faults in a real server, and when each probe's answer changes: the table of what is promised, as it was seen.

Run: `python -m tests.benchmarks.fault_table [--out FILE]`. Launcher, router and shard are real, the engine is a stub;
`--stall-limit` is 5 s, so that a stall is seen soon. Each probe is asked some 15 times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builders import tiny_checkpoint
from probe_watch import Change
from stub_server import StubServer

STALL_LIMIT_S = 5.0


def say(text: str) -> Callable[[StubServer], object]:
    """Send a prompt that makes the engine do something."""
    return lambda server: server.generate(text)


def send(number: signal.Signals, words: str = "stub_shard.py serve") -> Callable[[StubServer], object]:
    """Send a signal to a process of the server."""
    return lambda server: os.kill(server.child(words), number)


def stop(server: StubServer) -> None:
    """Ask the launcher to leave."""
    server.process.terminate()


def thaw_after(seconds: float) -> Callable[[StubServer], object]:
    """Stop the shard and let it go on."""

    def act(server: StubServer) -> None:
        pid = server.child("stub_shard.py serve")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return act


def load(how: str) -> Callable[[StubServer], object]:
    """Load another model at run time, whose load ends halfway; what the server said."""

    def act(server: StubServer) -> str:
        model = tiny_checkpoint(server.folder / "other", "llama").path
        if how == "cut":
            file = model / "model.safetensors"
            os.truncate(file, file.stat().st_size // 2)
        else:
            (server.folder / "next-load").write_text(how)
        status, error = server.load(str(model))
        return f"{status}: {error}".replace(f"{server.folder}/", "")

    return act


@dataclass(frozen=True)
class Fault:
    """What is done to a server that is ready (or that loads, with `while_loading`), and how long it is watched."""

    name: str
    act: Callable[[StubServer], object]
    watch_s: float = 9.0
    environ: dict[str, str] = field(default_factory=dict)
    while_loading: bool = False


FAULTS = (
    Fault("a step hangs", say("sleep 60")),
    Fault("a step computes and gets nowhere", say("spin 60")),
    Fault("a step raises", say("raise boom"), 3.0),
    Fault("a step works for 8 s with progress", say("work 8")),
    Fault("the device fails in a step", say("fatal the bus is gone"), 3.0),
    Fault("a step crashes the process (SIGSEGV)", say("crash"), 3.0),
    Fault("the device check fails", lambda server: device(server).write_text("raise no memory")),
    Fault("the device check hangs for 3 s", lambda server: device(server).write_text("sleep 3"), 6.0),
    Fault("the shard is killed", send(signal.SIGKILL), 3.0),
    Fault("the shard is stopped (SIGSTOP)", send(signal.SIGSTOP)),
    Fault("the shard is stopped for 2 s", thaw_after(2.0), 4.0),
    Fault("the router is stopped (SIGSTOP)", send(signal.SIGSTOP, "deepseek_tgi.router"), 3.0),
    Fault("the router is killed", send(signal.SIGKILL, "deepseek_tgi.router"), 3.0),
    Fault("SIGTERM to the launcher", stop, 3.0),
    Fault("the shard is killed while it loads", send(signal.SIGKILL), 3.0, {"STUB_LOAD_S": "60"}, while_loading=True),
    Fault("a load at run time meets a full disk", load("full"), 2.0),
    Fault("a load at run time runs out of memory", load("memory"), 2.0),
    Fault("a load's thread dies in the middle of a file", load("die"), 2.0),
    Fault("a load at run time meets a file that was cut short", load("cut"), 2.0),
    Fault("the model is truncated", lambda _: None, 6.0, {"STUB_LOAD_S": "2", "STUB_FAIL": "truncated"}, True),
)


def device(server: StubServer) -> Path:
    """The file that tells the device check what to do."""
    return server.folder / "device"


def seen(fault: Fault) -> dict[str, str]:
    """One row: what each probe answered, and after how many seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {"STUB_DEVICE": str(folder / "device"), "STUB_NEXT_LOAD": str(folder / "next-load"), **fault.environ}
        with StubServer.launch(folder, "--stall-limit", str(STALL_LIMIT_S), **environ) as server:
            if fault.while_loading:
                server.watch.wait("livez", 200, 60)
            else:
                server.wait_ready()
            time.sleep(0.5)
            began = time.monotonic()
            said = fault.act(server)
            time.sleep(max(0.0, fault.watch_s - (time.monotonic() - began)))
            changes = list(server.watch.changes)
    row = {face: story([c for c in changes if c.face == face], began) for face in ("readyz", "livez", "startupz")}
    return row | {"said": said if isinstance(said, str) else ""}


def story(changes: list[Change], began: float) -> str:
    """`200; 503 after 0.7 s`: the answer before, and each change since."""
    before = [change for change in changes if change.at < began]
    words = [answer_of(before[-1].status)] if before else []
    words += [f"{answer_of(c.status)} after {c.at - began:.1f} s" for c in changes if c.at >= began]
    return "; ".join(words)


def answer_of(status: int) -> str:
    """A status, or that there was none."""
    return str(status) if status else "no answer"


def main() -> None:
    """Run all and print a table; with `--out`, write it as JSON too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = {}
    print("| fault | /readyz | /livez | /startupz | the load's answer |\n| --- | --- | --- | --- | --- |")
    for fault in FAULTS:
        rows[fault.name] = row = seen(fault)
        print("|", " | ".join([fault.name, *row.values()]), "|", flush=True)
    if given.out is not None:
        report = {"stall_limit_s": STALL_LIMIT_S, "load_average": os.getloadavg()[0], "rows": rows}
        given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
