"""What every handler needs: one frozen value made at start."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from deepseek_tgi import __version__
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.http import Exchange
from deepseek_tgi.router.infer import Generated, Infer
from deepseek_tgi.router.liveness import Liveness
from deepseek_tgi.router.metrics import RouterMetrics
from deepseek_tgi.router.spans import Spans
from deepseek_tgi.router.traffic import Traffic
from deepseek_tgi.router.validation import Limits
from deepseek_tgi.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class RouterState:
    """The parts behind the routes and the facts they show."""

    config: RouterConfig
    limits: Limits
    infer: Infer
    liveness: Liveness
    metrics: RouterMetrics
    traffic: Traffic
    spans: Spans
    owner: Owner
    template: ChatTemplate | None
    model_sha: str | None = None
    pipeline_tag: str | None = None

    @property
    def system_fingerprint(self) -> str:
        """Version and build, as OpenAI answers carry them."""
        return f"{__version__}-{self.config.docker_label or 'native'}"

    async def body(self, exchange: Exchange) -> Any:
        """The request's JSON, held to the payload limit."""
        return await exchange.json(self.config.payload_limit)

    def stream_headers(self, characters: int) -> list[tuple[str, str]]:
        """Headers of every event stream."""
        return [
            ("x-compute-type", self.config.compute_type),
            ("x-compute-characters", str(characters)),
            ("x-accel-buffering", "no"),
        ]

    def answer_headers(self, generated: Generated, characters: int) -> list[tuple[str, str]]:
        """Headers of a whole answer; times in whole milliseconds but for `x-compute-time` (seconds)."""
        now = time.monotonic()
        timing = generated.timing
        inference = now - timing.admitted
        count = generated.ending.generated_tokens
        return [
            ("x-compute-type", self.config.compute_type),
            ("x-compute-time", repr(now - timing.arrived)),
            ("x-compute-characters", str(characters)),
            ("x-total-time", milliseconds(now - timing.arrived)),
            ("x-validation-time", milliseconds(timing.queued - timing.arrived)),
            ("x-queue-time", milliseconds(timing.admitted - timing.queued)),
            ("x-inference-time", milliseconds(inference)),
            ("x-time-per-token", milliseconds(inference / count)),
            ("x-prompt-tokens", str(generated.input_length)),
            ("x-generated-tokens", str(count)),
        ]


def milliseconds(seconds: float) -> str:
    """Whole milliseconds, cut."""
    return str(int(seconds * 1000))
