"""The control side of a running shard, as a synchronous client, beside `shard_client` that speaks TGI's calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.pb.control_pb2_grpc import ModelControlStub

LIMITS = pb.Limits(max_prefill_tokens=64, max_input_tokens=480, max_total_tokens=512)


class ControlClient:
    """One shard's `ModelControl`."""

    def __init__(self, socket: Path | str) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self.stub: Any = ModelControlStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def loading(self, model: Path | str, generation: int, **fields: Any) -> Iterator[pb.LoadProgress]:
        """The stages of a load, as they come."""
        known = {"revision", "quantize", "manifest_sha256"}
        source = pb.Source(model_id=str(model), **{key: fields.pop(key) for key in known & fields.keys()})
        fields.setdefault("limits", LIMITS)
        return iter(self.stub.Load(pb.LoadRequest(generation=generation, source=source, **fields), timeout=120))

    def load(self, model: Path | str, generation: int, **fields: Any) -> pb.LoadedModel:
        """A whole load; what was loaded."""
        *_, last = self.loading(model, generation, **fields)
        loaded: pb.LoadedModel = last.loaded
        return loaded

    def refusal(self, model: Path | str, generation: int, **fields: Any) -> tuple[grpc.StatusCode, str]:
        """Status and text of a load that must fail."""
        try:
            self.load(model, generation, **fields)
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"{model} was loaded")

    def publish(self, generation: int) -> int:
        return int(self.stub.Publish(pb.PublishRequest(generation=generation)).before)

    def unload(self, generation: int) -> int:
        return int(self.stub.Unload(pb.UnloadRequest(generation=generation)).freed_bytes)

    def sleep(self, generation: int, drop_weights: bool = False, keep_pages: bool = False) -> int:
        request = pb.SleepRequest(generation=generation, drop_weights=drop_weights, keep_pages=keep_pages)
        return int(self.stub.Sleep(request, timeout=60).freed_bytes)

    def wake(self, generation: int) -> list[str]:
        """The stages that waking went through."""
        return [step.stage for step in self.stub.Wake(pb.WakeRequest(generation=generation), timeout=60)]

    def status(self) -> pb.StatusResponse:
        answer: pb.StatusResponse = self.stub.Status(pb.StatusRequest())
        return answer
