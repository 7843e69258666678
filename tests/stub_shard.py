"""A shard process around an engine without a model: for tests of sockets, signals and statuses.

Run as `python tests/stub_shard.py serve …`, as the launcher runs `text-generation-server`. The first prompt of a
Prefill tells the engine what to do: `sleep 2`, `spin 2`, `work 2` (with signs of progress), `raise TEXT`,
`refuse TEXT`, `fatal TEXT`, `crash`; anything else yields a token. The file STUB_DEVICE tells the device check.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_tgi.config import DownloadConfig, ShardConfig, read
from deepseek_tgi.core import (
    CachedBatch,
    FinishReason,
    GeneratedText,
    Generation,
    Request,
    StepResult,
    StepTimings,
    Tokens,
)
from deepseek_tgi.engine.config import ModelFacts, ShardInfo, WarmupResult
from deepseek_tgi.errors import BatchNotFoundError, CheckpointError, DeviceError, RequestError
from deepseek_tgi.options import Program
from deepseek_tgi.server.loading import Count, Report

logger = logging.getLogger("deepseek_tgi.stub")
TIMINGS = StepTimings(forward_ns=3, decode_ns=2, total_ns=5)


@dataclass
class StubEngine:
    """Keeps batches by id and counts its calls; a request never ends unless it asks for one token."""

    batches: dict[int, CachedBatch] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    on_progress: Callable[[], None] | None = None

    def go_on_preparing(self) -> bool:
        return False

    def watch(self, on_progress: Callable[[], None]) -> None:
        self.on_progress = on_progress

    def info(self) -> ShardInfo:
        return ShardInfo("float32", "cpu", "stub", block_size=16, use_prefix_caching=True)

    def turn(self, call: int) -> int:
        return call

    def warmup(
        self,
        requests: list[Request],
        max_input_tokens: int | None,
        max_prefill_tokens: int,
        max_total_tokens: int | None,
        reserved_bytes: int | None = None,
    ) -> WarmupResult:
        self.calls.append("warmup")
        return WarmupResult(8192, max_input_tokens or 4095, max_total_tokens or 4096)

    def prefill(self, batch_id: int, requests: list[Request], cached: CachedBatch | None) -> StepResult:
        self.calls.append("prefill")
        self._obey(requests[0].text)
        unfinished = tuple(r.id for r in requests if r.stop.max_new_tokens > 1)
        if cached is not None:
            unfinished = self._pop(cached.id).request_ids + unfinished
        return self._store(batch_id, unfinished, [_generation(r.id, r.stop.max_new_tokens <= 1) for r in requests])

    def decode(self, batch_ids: list[int]) -> StepResult:
        self.calls.append("decode")
        if not batch_ids:
            raise RequestError("batches: empty, expected at least one")
        ids = tuple(i for batch_id in batch_ids for i in self._pop(batch_id).request_ids)
        return self._store(batch_ids[0], ids, [_generation(i, False) for i in ids])

    def filter(self, batch_id: int, request_ids: list[int]) -> CachedBatch:
        self._pop(batch_id)
        self.batches[batch_id] = CachedBatch(batch_id, tuple(request_ids), 16, len(request_ids))
        return self.batches[batch_id]

    def clear(self, batch_id: int | None) -> None:
        self.calls.append(f"clear {batch_id}")
        if batch_id is None:
            self.batches.clear()
        else:
            self.batches.pop(batch_id, None)

    def facts(self) -> ModelFacts:
        return ModelFacts("stub", 100, 100, frozenset({0}), 8192, 1000, 500)

    def holds(self, batch_id: int | None) -> bool:
        return bool(self.batches) if batch_id is None else batch_id in self.batches

    def requests_of(self, batch_id: int) -> Sequence[int]:
        return self.batches[batch_id].request_ids

    def discard(self, blocks: Sequence[int]) -> int:
        return len(blocks)

    def untouched_bytes(self) -> int:
        return 0

    def sleep(self, keep_pages: bool = False) -> int:
        self.calls.append("sleep")
        return 500

    def wake(self) -> None:
        self.calls.append("wake")

    def health(self) -> None:
        self.calls.append("health")
        device = Path(os.environ.get("STUB_DEVICE", "/nowhere"))
        if device.exists():
            self._obey(device.read_text())

    def close(self) -> None:
        self.calls.append("close")

    def _pop(self, batch_id: int) -> CachedBatch:
        if batch_id not in self.batches:
            raise BatchNotFoundError(f"batch {batch_id} is not held; held: {sorted(self.batches)}")
        return self.batches.pop(batch_id)

    def _store(self, batch_id: int, ids: tuple[int, ...], generations: list[Generation]) -> StepResult:
        if not ids:
            return StepResult(generations, None, TIMINGS)
        self.batches[batch_id] = CachedBatch(batch_id, ids, 16 * len(ids), len(ids))
        return StepResult(generations, self.batches[batch_id], TIMINGS)

    def _obey(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        logger.info("told to %s", word)
        if word == "sleep":
            time.sleep(float(rest))
        elif word == "spin":
            _spin(float(rest))
        elif word == "work":
            for _ in range(int(float(rest) / 0.05)):
                time.sleep(0.05)
                assert self.on_progress is not None
                self.on_progress()
        elif word == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif word == "raise":
            raise ZeroDivisionError(rest)
        elif word == "refuse":
            raise RequestError(rest)
        elif word == "fatal":
            raise DeviceError(rest)


def _spin(seconds: float) -> None:
    """Compute and get nowhere."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(1000))


def _generation(request_id: int, done: bool) -> Generation:
    text = GeneratedText("ok", 1, FinishReason.LENGTH) if done else None
    return Generation(request_id, Tokens([7], [-0.5], ["ok"], [False]), generated_text=text)


def _break(how: str) -> None:
    """A load ends halfway: `full` (no space), `memory` (none), `die` (its thread leaves)."""
    if how == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/kernels")
    if how == "memory":
        raise MemoryError("no more")
    if how == "die":
        raise SystemExit(3)


def load_stub(config: ShardConfig, count: Count, report: Report | None = None) -> StubEngine:
    """As long as STUB_LOAD_S says; STUB_FAIL is why it cannot be; the file STUB_NEXT_LOAD says how one breaks."""
    if report is not None and (told := Path(os.environ.get("STUB_NEXT_LOAD", "/nowhere"))).exists():
        report(40.0)
        _break(told.read_text())
    time.sleep(float(os.environ.get("STUB_LOAD_S", "0")))
    if reason := os.environ.get("STUB_FAIL"):
        raise CheckpointError(reason)
    return StubEngine()


def main(argv: list[str]) -> int:
    """`serve` with the stub engine; `download-weights` records its argv and environment in STUB_RECORD."""
    if record := os.environ.get("STUB_RECORD"):
        with open(record, "a", encoding="utf-8") as file:
            file.write(json.dumps({"argv": argv, "env": dict(os.environ)}) + "\n")
    if argv[0] == "download-weights":
        read(DownloadConfig, Program("download-weights", ""), argv[1:], os.environ)
        sys.stderr.write(os.environ.get("STUB_DOWNLOAD_FAIL", ""))
        return 3 if os.environ.get("STUB_DOWNLOAD_FAIL") else 0
    from deepseek_tgi.server import __main__ as server

    return server.main(argv, load_stub)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
