"""Starts a shard as TGI's launcher does and speaks `generate.v3` to it as TGI's router does.

Everything here follows the TGI contract (argv, environment, readiness, transport), nothing follows our own code: only
the generated messages are shared, and another test pins those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb import generate_pb2_grpc as pb_grpc

M = TypeVar("M")

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 120.0
HEALTH_ID = 2**64 - 1
LOG_LEVELS = frozenset({"TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL"})


def serve_argv(model_id: str, uds_path: Path, extra: Sequence[str] = ()) -> list[str]:
    """What the launcher puts behind `text-generation-server` for an unsharded model."""
    fixed = ["serve", model_id, "--uds-path", str(uds_path), "--logger-level", "INFO", "--json-output"]
    return [*fixed, *extra, "--otlp-service-name", "text-generation-inference.router"]


def serve_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment: its own without LOG_LEVEL, plus the fixed additions, plus `additions`."""
    own = {k: v for k, v in os.environ.items() if k != "LOG_LEVEL" and k != "PYTEST_CURRENT_TEST"}
    fixed = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "CUDA_MEMORY_FRACTION": "1",
        "SAFETENSORS_FAST_GPU": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_ENABLE_HF_TRANSFER": "1",
        "PREFIX_CACHING": "true",
        "ATTENTION": "flashinfer",
        "CUDA_GRAPHS": "1,2,4,8,16,32",
    }
    return own | fixed | dict(additions)


@dataclass
class ShardProcess:
    """One running shard: its socket, its log lines and its pid."""

    process: subprocess.Popen[bytes]
    uds_path: Path
    rank: int = 0
    stdout: list[bytes] = field(default_factory=list)
    stderr: list[bytes] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return Path(f"{self.uds_path}-{self.rank}")

    @classmethod
    def spawn(cls, argv: Sequence[str], environment: Mapping[str, str], uds_path: Path) -> ShardProcess:
        """Run `python -m deepseek_tgi.server` with pipes and a process group of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "deepseek_tgi.server", *argv],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        shard = cls(process, uds_path, int(environment.get("RANK", "0")))
        for stream, lines in ((process.stdout, shard.stdout), (process.stderr, shard.stderr)):
            assert stream is not None
            reader = threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            reader.start()
            shard._readers.append(reader)
        return shard

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the socket file exists; an earlier exit is an error with the process's own words."""
        deadline = time.monotonic() + timeout_s
        while not self.socket.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"shard left with {self.process.returncode} before it listened:\n{self.words()}")
            if time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"no socket {self.socket} after {timeout_s} s:\n{self.words()}")
            time.sleep(0.02)

    def words(self) -> str:
        """All that it printed so far."""
        return b"".join([*self.stdout, *self.stderr]).decode(errors="replace")

    def log(self) -> list[dict[str, Any]]:
        """The stdout lines, which must all be JSON records the launcher can read."""
        records = [json.loads(line) for line in list(self.stdout)]
        for record in records:
            assert isinstance(record["text"], str), record
            assert record["record"]["level"]["name"] in LOG_LEVELS, record
        return records

    def rss_bytes(self) -> int:
        """Resident memory of the process, mapped files left out."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024

    def stop(self) -> int:
        """SIGTERM, then SIGKILL after 20 s; the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        for reader in self._readers:
            reader.join(5)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return status


class ShardClient:
    """The eight calls, each with a generous deadline so that a hang is a failure and not a stuck suite."""

    def __init__(self, socket: Path, metadata: Sequence[tuple[str, str]] = ()) -> None:
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.default_authority", "[::]:50051"),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        self._stub = pb_grpc.TextGenerationServiceStub(self.channel)
        self.metadata = tuple(metadata)

    def _call(self, message: Any, kind: type[M], timeout: float = CALL_TIMEOUT_S) -> M:
        name = type(message).__name__.removesuffix("Request")
        answer = getattr(self._stub, name)(message, timeout=timeout, metadata=self.metadata)
        assert isinstance(answer, kind)
        return answer

    def info(self) -> pb.InfoResponse:
        """Constant facts."""
        return self._call(pb.InfoRequest(), pb.InfoResponse)

    def discover(self) -> list[str]:
        """Urls of all ranks."""
        return list(self._call(pb.ServiceDiscoveryRequest(), pb.ServiceDiscoveryResponse).urls)

    def health(self, timeout: float = CALL_TIMEOUT_S) -> pb.HealthResponse:
        """Cheap liveness."""
        return self._call(pb.HealthRequest(), pb.HealthResponse, timeout)

    def clear(self, batch_id: int | None = None) -> pb.ClearCacheResponse:
        """Forget one batch, or all."""
        return self._call(pb.ClearCacheRequest(id=batch_id), pb.ClearCacheResponse)

    def filter(self, batch_id: int, ids: Iterable[int]) -> pb.CachedBatch:
        """Keep exactly `ids`, in that order; the answer must carry a batch."""
        response = self._call(pb.FilterBatchRequest(batch_id=batch_id, request_ids=list(ids)), pb.FilterBatchResponse)
        assert response.HasField("batch"), "FilterBatch without a batch makes the router drop its entries"
        return response.batch

    def prefill(
        self, requests: Sequence[pb.Request], batch_id: int, cached: pb.CachedBatch | None = None
    ) -> pb.PrefillResponse:
        """One step for `requests` and, if given, for the cached batch."""
        batch = pb.Batch(
            id=batch_id,
            requests=requests,
            size=len(requests),
            max_tokens=sum(len(r.slots) for r in requests),
            max_blocks=max((len(r.blocks) for r in requests), default=0),
        )
        return self._call(pb.PrefillRequest(batch=batch, cached_batch=cached), pb.PrefillResponse)

    def health_prefill(self) -> pb.PrefillResponse:
        """The router's dummy generation."""
        return self._call(health_request(), pb.PrefillResponse)

    def decode(self, batches: Sequence[pb.CachedBatch]) -> pb.DecodeResponse:
        """One step for cached batches."""
        return self._call(pb.DecodeRequest(batches=batches), pb.DecodeResponse)

    def warmup(
        self, max_prefill_tokens: int, max_input_tokens: int | None = None, max_total_tokens: int | None = None
    ) -> pb.WarmupResponse:
        """The router's own warm-up: see `warmup_request`."""
        return self._call(warmup_request(max_prefill_tokens, max_input_tokens, max_total_tokens), pb.WarmupResponse)

    def close(self) -> None:
        """Drop the connection."""
        self.channel.close()


def attempt(call: Callable[[], Any]) -> tuple[Any, grpc.RpcError | None]:
    """What a call answered, or the clean error it ended with; a dead or mute shard is neither."""
    try:
        return call(), None
    except grpc.RpcError as raised:
        error = raised
    dead = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)
    assert error.code() not in dead, error
    assert len(error.details() or "") > 10, error
    assert "Traceback" not in (error.details() or ""), error
    return None, error


def warmup_request(
    max_prefill_tokens: int, max_input_tokens: int | None = None, max_total_tokens: int | None = None
) -> pb.WarmupRequest:
    """Requests with id 0 each whose truncations sum to `max_prefill_tokens`; the first also has a small image."""
    image = pb.Image(data=b"\xff\xd8\xff\xe0tiny", mimetype="image/jpeg;base64")
    requests: list[pb.Request] = []
    missing = max_prefill_tokens
    while missing > 0:
        truncate = min(max_input_tokens or missing, missing)
        text = "_test " * truncate
        chunks = [pb.InputChunk(text=text)]
        if not requests:
            chunks.append(pb.InputChunk(image=image))
            text += "![](data:image/jpeg;base64,/9j/4HRpbnk=)"
        requests.append(
            pb.Request(
                id=0,
                inputs=text,
                input_chunks=pb.Input(chunks=chunks),
                truncate=truncate,
                add_special_tokens=True,
                prefill_logprobs=True,
                top_n_tokens=20,
                parameters=pb.NextTokenChooserParameters(
                    temperature=0.9,
                    top_k=10,
                    top_p=0.9,
                    typical_p=0.9,
                    repetition_penalty=1.2,
                    frequency_penalty=0.1,
                    watermark=True,
                ),
                stopping_parameters=pb.StoppingCriteriaParameters(
                    max_new_tokens=max_total_tokens - truncate if max_total_tokens else 1, ignore_eos_token=True
                ),
            )
        )
        missing -= truncate
    batch = pb.Batch(id=0, requests=requests, size=len(requests), max_tokens=max_input_tokens or 0)
    return pb.WarmupRequest(
        batch=batch,
        max_input_tokens=max_input_tokens,
        max_prefill_tokens=max_prefill_tokens,
        max_total_tokens=max_total_tokens,
    )


def health_request() -> pb.PrefillRequest:
    """The router's dummy generation, to the letter (contract 2.8)."""
    request = pb.Request(
        id=HEALTH_ID,
        inputs="liveness",
        input_chunks=pb.Input(chunks=[pb.InputChunk(text="liveness")]),
        truncate=1,
        add_special_tokens=False,
        parameters=neutral_parameters(),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
        blocks=[0],
        slots=[0],
    )
    return pb.PrefillRequest(batch=pb.Batch(id=HEALTH_ID, requests=[request], size=1, max_tokens=2, max_blocks=1))


def neutral_parameters(**over: Any) -> pb.NextTokenChooserParameters:
    """Greedy with every processor off, as the router spells it."""
    neutral: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    return pb.NextTokenChooserParameters(**(neutral | over))
