"""A stub shard in a process of its own, with a client: for tests that watch it from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import grpc

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb import generate_pb2_grpc as pb_grpc

STUB = str(Path(__file__).with_name("stub_shard.py"))


class StubShard:
    """One shard; a context manager that kills it at the end."""

    def __init__(self, stem: Path, environ: Mapping[str, str]) -> None:
        self.path = Path(f"{stem}-{environ.get('RANK', '0')}")
        self.process = subprocess.Popen(
            [sys.executable, STUB, "serve", "some/model", "--uds-path", str(stem), "--json-output"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environ},
            start_new_session=True,
        )
        self.channel = grpc.insecure_channel(f"unix:{self.path}", options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = pb_grpc.TextGenerationServiceStub(self.channel)

    def __enter__(self) -> StubShard:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_ready(self) -> None:
        """Until its socket is there."""
        deadline = time.monotonic() + 30
        while not self.path.exists():
            assert self.process.poll() is None, f"ended with {self.process.returncode}"
            assert time.monotonic() < deadline, "no socket"
            time.sleep(0.005)

    def warm(self) -> None:
        """Do what a router does first."""
        stop = pb.StoppingCriteriaParameters(max_new_tokens=1)
        batch = pb.Batch(requests=[pb.Request(inputs="x", truncate=9, stopping_parameters=stop)])
        self.stub.Warmup(pb.WarmupRequest(batch=batch, max_prefill_tokens=64), timeout=20)

    def wait_for_line(self, words: str) -> None:
        """Read stdout up to the line with `words`."""
        assert self.process.stdout is not None
        while words.encode() not in (line := self.process.stdout.readline()):
            assert line, f"ended without saying {words!r}"
