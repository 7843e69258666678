"""How an engine comes to its cache: limits checked, memory measured or counted, one step run to see that it can.

Alone in its process a model runs the largest step that may come and measures what it takes. Beside others it must not:
that step would hold up theirs, and what the process takes meanwhile is not its doing alone. There the declared
workspace stands, and a short step shows that the model runs and that its logits are numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import Request
from deepseek_tgi.engine.admission import Admission
from deepseek_tgi.engine.batch import Batch, make_batch
from deepseek_tgi.engine.config import FIRST_BLOCK, EngineConfig, blocks_for
from deepseek_tgi.engine.memory import MemoryReader
from deepseek_tgi.engine.runner import Runner
from deepseek_tgi.engine.warmup import (
    DEFAULT_BATCH_SIZE,
    Limits,
    Plan,
    cache_budget,
    plan_cache,
    workspace_bytes,
    worst_case,
)

log = logging.getLogger(__name__)

MakeRunner = Callable[[int, int], Runner]
"""From a number of blocks and the tokens of a prefill step."""


@dataclass(frozen=True, slots=True)
class Warming:
    """The parts of an engine that its warm-up needs."""

    adapter: ModelAdapter
    config: EngineConfig
    memory: MemoryReader
    admission: Admission
    make_runner: MakeRunner

    def alone(self, requests: Items[Request], limits: Limits) -> tuple[Plan, Runner]:
        """Run `requests` as the largest step there may be, measure, and make the cache.

        Raises: `ConfigError` for limits that contradict each other or the model, `ResourceError` if memory is short.
        """
        workspace = self._declared_workspace(limits)
        # The plan on declared figures first: what cannot fit must not be tried.
        self._plan(limits, self._available(), workspace)
        before = self.memory.resident_bytes()
        tokens = limits.max_prefill_tokens
        log.info("warm-up: running the largest step that may come, of %d tokens, to measure it", tokens)
        with self.together():
            measured = self._measure(requests, tokens) + self._overhead(limits)
        # What the step keeps (scratch buffers) is workspace; it is no longer free and must not count twice.
        kept = min(max(workspace, measured), max(0, self.memory.resident_bytes() - before))
        workspace = max(workspace, self._largest(measured))
        return self._made(self._plan(limits, self._available(kept), workspace), limits, workspace)

    def beside(self, requests: Items[Request], limits: Limits, reserved_bytes: int) -> tuple[Plan, Runner]:
        """Run `requests`, which are short, and make the cache; other models are still to touch `reserved_bytes`.

        Raises: as `alone`; and `GenerationError` if the step yields no numbers.
        """
        workspace = self._declared_workspace(limits)
        plan = self._plan(limits, self._available() - reserved_bytes, workspace)
        with self.together():
            self._measure(requests, limits.max_prefill_tokens)
        return self._made(plan, limits, workspace)

    def _made(self, plan: Plan, limits: Limits, workspace: int) -> tuple[Plan, Runner]:
        with self.together():
            runner = self.make_runner(plan.num_blocks, limits.max_prefill_tokens)
        layout = self.adapter.kv_layout
        log.info(
            "cache of %d blocks of %d tokens, %d bytes, for requests of up to %d tokens; %d bytes of workspace",
            plan.num_blocks, layout.block_size, runner.pool.nbytes, plan.result.max_total_tokens, workspace,
        )  # fmt: skip
        return plan, runner

    def _plan(self, limits: Limits, available_bytes: int, workspace: int) -> Plan:
        total = self._default_total()
        budget = cache_budget(available_bytes, workspace, self.config)
        return plan_cache(self.adapter.kv_layout, limits, total, budget, self.config, agree=self._smallest)

    def _measure(self, requests: Items[Request], max_prefill_tokens: int) -> int:
        """Run the requests on a cache of their own; bytes it took at its peak, 0 if that was no new peak."""
        size = self.adapter.kv_layout.block_size
        requests = worst_case(requests, self.adapter.info.max_position_embeddings)
        slots = sum(blocks_for(r.truncate + 1, size) for r in requests)
        runner = self.make_runner(FIRST_BLOCK + max(slots, 1), max_prefill_tokens)
        before, peak_before = self.memory.resident_bytes(), self.memory.peak_bytes()
        try:
            sequences = self.admission.admit(runner, requests, [], others=False).sequences
            batch: Batch | None = make_batch(0, sequences, size)
            while batch is not None:
                batch = runner.run(batch).batch
            peak = self.memory.peak_bytes()
            return max(0, peak - before - runner.pool.nbytes) if peak > peak_before else 0
        finally:
            runner.pool.close()

    def _declared_workspace(self, limits: Limits) -> int:
        limits.check(self.adapter.info.max_position_embeddings, self.config.prefill_chunking)
        return self._largest(workspace_bytes(self.adapter, limits, self.config) + self._overhead(limits))

    def _overhead(self, limits: Limits) -> int:
        batch_size = self.config.max_batch_size or DEFAULT_BATCH_SIZE
        return self.adapter.pool_overhead_bytes(batch_size, limits.max_total_tokens or self._default_total())

    def _default_total(self) -> int:
        positions = self.adapter.info.max_position_embeddings
        return min(positions, self.adapter.tokenizer.model_max_length or positions)

    def _smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers: they must make the same plan, or raise the same error."""
        ranks = self.adapter.ranks
        return number if ranks is None else ranks.smallest(number)

    def _largest(self, number: int) -> int:
        return -self._smallest(-number)

    def _available(self, kept: int = 0) -> int:
        """Memory each rank may take, `kept` of it being held already: on CPUs the ranks share one machine's."""
        sharers = self.config.world_size if self.adapter.info.device == "cpu" else 1
        return self._smallest(self.memory.available_bytes() // sharers + kept)

    def together(self) -> AbstractContextManager[None]:
        """Around what all ranks do."""
        ranks = self.adapter.ranks
        return nullcontext() if ranks is None else ranks.together()
