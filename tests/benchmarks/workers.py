"""The benchmark's line protocol: one process a side, a model loaded once, and questions asked in turn.

Choice: both sides stay loaded and answer alternately. Prevents: one side measured while the machine is warm, cool or
busy with something else, and the other not. An idle side waits on a pipe and takes no time.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.benchmarks.measure import peak_memory_bytes


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt, as text and as the ids that both sides must see: the last `len(ids)` that `text` encodes to."""

    text: str
    ids: list[int]


class Worker:
    """One side's process. Operations: `generate` (one sequence) and `batched` (many in one batch)."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def generate(self, passage: Passage, tokens: int) -> dict[str, Any]:
        """`prefill_s`, `decode_s`, `tokens` and `text` of one prompt and `tokens` more greedy steps."""
        return self._ask({"op": "generate", "text": passage.text, "ids": passage.ids, "tokens": tokens})

    def batched(self, passages: Sequence[Passage], tokens: int) -> dict[str, Any]:
        """`total_s`, `decode_s` and `tokens` of many prompts generated together."""
        return self._ask(
            {
                "op": "batched",
                "texts": [passage.text for passage in passages],
                "prompts": [passage.ids for passage in passages],
                "tokens": tokens,
            }
        )

    def peak_memory_bytes(self) -> int:
        """Largest resident size of the process so far."""
        return sum(peak_memory_bytes(self._process.pid).values())

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process left with {self._process.wait()}; see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer
