"""What a token costs in the embedded router: CPU time of its process, in front of a shard that only pretends.

Run: `python -m tests.benchmarks.router_cost [--streams 16] [--tokens 400] [--path /generate_stream]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_tokenizer import write_tokenizer

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cost:
    """Router CPU per token and the rate at which tokens came."""

    microseconds_per_token: float
    tokens_per_second: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def one_stream(port: int, path: str, tokens: int) -> int:
    """Read one stream to its end; the number of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"inputs": "hello", "parameters": {"max_new_tokens": tokens}, "stream": True, "max_tokens": tokens}
    body["messages"] = [{"role": "user", "content": "hello"}]
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    events = 0
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        chunk = await reader.read(65536)
        events += (tail[-5:] + chunk).count(b"data: ") - tail[-5:].count(b"data: ")
        tail = (tail + chunk)[-16:]
    writer.close()
    return events


async def measure(port: int, pid: int, path: str, streams: int, tokens: int) -> Cost:
    """Run `streams` at once and divide."""
    await asyncio.gather(*(one_stream(port, path, 20) for _ in range(streams)))
    cpu, started = cpu_seconds(pid), time.monotonic()
    events = sum(await asyncio.gather(*(one_stream(port, path, tokens) for _ in range(streams))))
    return Cost((cpu_seconds(pid) - cpu) / events * 1e6, events / (time.monotonic() - started))


SHARD = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fake_script import Traits
from fake_shard import FakeShard
async def main():
    shard = FakeShard(Path(sys.argv[1]), Traits(max_total_tokens=4000, num_blocks=8000))
    await shard.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


def run(path: str, streams: int, tokens: int) -> Cost:
    """Start shard and router, measure, stop both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        path_of_shard = folder / "shard-0"
        port = _free_port()
        shard = subprocess.Popen([sys.executable, "-c", SHARD.format(tests=str(TESTS)), str(path_of_shard)])
        while not path_of_shard.exists():
            time.sleep(0.02)
        argv = ["--tokenizer-name", name, "--master-shard-uds-path", str(path_of_shard), "--port", str(port)]
        router = subprocess.Popen(
            [sys.executable, "-m", "deepseek_tgi.router", *argv, "--hostname", "127.0.0.1"], stdout=subprocess.DEVNULL
        )
        try:
            return asyncio.run(_when_up(port, router.pid, path, streams, tokens))
        finally:
            router.terminate()
            router.wait()
            shard.terminate()
            shard.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _when_up(port: int, pid: int, path: str, streams: int, tokens: int) -> Cost:
    for _ in range(500):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return await measure(port, pid, path, streams, tokens)
    raise TimeoutError(f"no router on port {port}")


def main() -> None:
    """Print the cost of a token on each streaming route."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--path", action="append")
    wish = parser.parse_args()
    for path in wish.path or ["/generate_stream", "/v1/chat/completions"]:
        cost = run(path, wish.streams, wish.tokens)
        print(
            f"{path}: {cost.microseconds_per_token:.0f} us of router CPU a token "
            f"({wish.streams} streams, {cost.tokens_per_second:.0f} tokens/s)"
        )


if __name__ == "__main__":
    main()
