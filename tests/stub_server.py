"""A whole server, launcher, router and shard, whose shard has a stub engine: what a prompt says happens."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from launched_server import descendants, free_port
from probe_watch import ProbeWatch
from tiny_tokenizer import write_tokenizer

STUB = Path(__file__).with_name("stub_shard.py")
ADMIN_TOKEN = "let-me-change-models"
LAUNCH = """
import sys
from deepseek_tgi.launcher import main, shards
made = shards.Plan
shards.Plan = main.Plan = lambda **parts: made(**parts, server_argv=(sys.executable, {stub!r}))
sys.exit(main.main(sys.argv[1:]))
"""


@dataclass
class StubServer:
    """One that was launched, with a prober at its probe port. A context manager; at the end nothing is left."""

    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    watch: ProbeWatch
    client: httpx.Client

    @classmethod
    def launch(cls, folder: Path, *argv: str, **environ: str) -> StubServer:
        """Start it; does not wait."""
        model = folder / "model"
        model.mkdir()
        write_tokenizer(model)
        port, probe_port = free_port(), free_port()
        options = [
            *("--backend", "deepseek-quant", "--model-id", str(model), "--port", str(port), "--hostname", "127.0.0.1"),
            *("--shard-uds-path", str(folder / "s"), "--router", "embedded", "--probe-port", str(probe_port), *argv),
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH.format(stub=str(STUB)), *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "DEEPSEEK_TGI_ADMIN_TOKEN": ADMIN_TOKEN, **environ}, cwd=folder,
            )  # fmt: skip
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)
        return cls(folder, process, port, ProbeWatch(probe_port).__enter__(), client)

    def __enter__(self) -> StubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.__exit__()
        self.client.close()
        self.process.kill()
        self.process.wait()

    def wait_ready(self) -> None:
        """Until it is ready; what the probes said before is forgotten."""
        self.watch.wait("readyz", 200, 60)
        self.watch.changes.clear()
        self.watch.wait("readyz", 200, 5)

    def child(self, words: str) -> int:
        """The process below the launcher whose command line has `words`."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for pid, line in descendants(self.process.pid).items():
                if words in line and "guard.py" not in line:
                    return pid
            time.sleep(0.02)
        raise AssertionError(f"no child with {words!r}")

    def generate(self, text: str) -> threading.Thread:
        """Send a request from a thread of its own; the answer does not matter."""
        body = {"inputs": text, "parameters": {"max_new_tokens": 1}}

        def send() -> None:
            try:
                httpx.post(f"http://127.0.0.1:{self.port}/generate", json=body, timeout=60)
            except httpx.HTTPError:
                return

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        return thread

    def load(self, model: str) -> tuple[int, str]:
        """Load a model at run time; the status, and the error if there is one."""
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        answer = self.client.post("/admin/models/load", json={"model_id": model}, headers=headers, timeout=60)
        return answer.status_code, str(answer.json().get("error", ""))

    def status(self, path: str) -> int:
        """Of the HTTP port."""
        return self.client.get(path).status_code
