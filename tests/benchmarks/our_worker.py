"""Our engine behind the benchmark's line protocol: the calls that a shard makes, without gRPC or HTTP."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import Generation, Request, SamplingParams, StepResult, StopRule
from deepseek_tgi.engine.config import EngineConfig
from deepseek_tgi.engine.engine import Engine

MAX_PREFILL_TOKENS, MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS = 2048, 1024, 2048


class Ours:
    """An engine and the router's part of the work: who gets which block."""

    def __init__(self, model: str) -> None:
        self.adapter = QuantizedModelAdapter.get_model(model, None, LoadOptions())
        self.engine = Engine(self.adapter, EngineConfig())
        self.block_size = self.engine.info().block_size
        rest = MAX_TOTAL_TOKENS - MAX_INPUT_TOKENS
        longest = self.request(0, "warm " * MAX_INPUT_TOKENS, MAX_INPUT_TOKENS, rest, [])
        self.engine.warmup([longest], MAX_INPUT_TOKENS, MAX_PREFILL_TOKENS, MAX_TOTAL_TOKENS)
        self.batch_id = 0

    def request(self, request_id: int, text: str, prompt_tokens: int, tokens: int, blocks: Sequence[int]) -> Request:
        slots = [block * self.block_size + at for block in blocks for at in range(self.block_size)]
        return Request(
            id=request_id,
            text=text,
            truncate=prompt_tokens,
            sampling=SamplingParams(),
            stop=StopRule(max_new_tokens=tokens, ignore_eos=True),
            blocks=tuple(blocks),
            slots=tuple(slots),
        )

    def requests(self, texts: Sequence[str], lengths: Sequence[int], tokens: int) -> list[Request]:
        """One request a text, each in blocks of its own from block 1 on."""
        made: list[Request] = []
        first = 1
        for index, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            count = -(-(length + tokens) // self.block_size)
            made.append(self.request(index, text, length, tokens, range(first, first + count)))
            first += count
        return made

    def run(self, requests: list[Request], steps: int) -> tuple[float, float, list[Generation]]:
        """Seconds of the prefill and of `steps` decode steps, and the last generations."""
        self.batch_id += 1
        started = time.perf_counter()
        result: StepResult = self.engine.prefill(self.batch_id, requests, None)
        prefilled = time.perf_counter()
        for _ in range(steps):
            assert result.batch is not None, "a request ended early"
            result = self.engine.decode([result.batch.id])
        done = time.perf_counter()
        self.engine.clear(None)
        return prefilled - started, done - prefilled, result.generations


def generate(ours: Ours, request: dict[str, Any]) -> dict[str, Any]:
    """Prefill one prompt, then `tokens` greedy steps: both times, and the text."""
    tokens = request["tokens"]
    requests = ours.requests([request["text"]], [len(request["ids"])], tokens + 1)
    prefill_s, decode_s, generations = ours.run(requests, tokens)
    final = generations[0].generated_text
    assert final is not None, "the request did not end"
    return {"prefill_s": prefill_s, "decode_s": decode_s, "tokens": tokens, "text": final.text}


def batched(ours: Ours, request: dict[str, Any]) -> dict[str, Any]:
    """All `prompts` in one prefill and `tokens` steps of all together."""
    tokens, lengths = request["tokens"], [len(ids) for ids in request["prompts"]]
    prefill_s, decode_s, _ = ours.run(ours.requests(request["texts"], lengths, tokens), tokens - 1)
    return {"total_s": prefill_s + decode_s, "decode_s": decode_s, "tokens": tokens * len(lengths)}


def main() -> None:
    ours = Ours(sys.argv[1])
    info = ours.adapter.info
    about = {
        "version": info.quantization,
        "system": f"{info.dtype}, {info.attention_impl}, cache {ours.adapter.kv_layout.mode.value}",
        "weight_bytes": info.weight_bytes,
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        run = {"generate": generate, "batched": batched}[request["op"]]
        print(json.dumps(run(ours, request)), flush=True)


if __name__ == "__main__":
    main()
