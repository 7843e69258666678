"""The shard's mind behind the eight calls: batches in, generations out. Synchronous, for one calling thread.

Every Prefill or Decode first takes the batches it names out of the store and puts the result back last. So a call that
raises, for whatever reason, has dropped them, and the engine serves the next call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import HEALTH_REQUEST_ID, CachedBatch, Generation, Request, StepResult, StepTimings
from deepseek_tgi.engine.admission import Admission
from deepseek_tgi.engine.batch import Batch, concatenate, filtered, make_batch
from deepseek_tgi.engine.batch_store import BatchStore
from deepseek_tgi.engine.config import (
    Counter,
    EngineConfig,
    ModelFacts,
    ShardInfo,
    WarmupResult,
    ignore,
)
from deepseek_tgi.engine.intake import Intake
from deepseek_tgi.engine.memory import MemoryReader, memory_of
from deepseek_tgi.engine.runner import Runner, Stepped
from deepseek_tgi.engine.warming import Warming
from deepseek_tgi.engine.warmup import DEFAULT_BATCH_SIZE, Limits
from deepseek_tgi.errors import DeviceError, NotReadyError, RequestError, ResourceError
from deepseek_tgi.kv.pool import KVPool

__all__ = ["Engine", "EngineConfig", "ShardInfo", "WarmupResult"]

log = logging.getLogger(__name__)


class Engine:
    """Serves one adapter. Owns the pool (from `warmup` on) and the cached batches."""

    def __init__(
        self,
        adapter: ModelAdapter,
        config: EngineConfig | None = None,
        counter: Counter = ignore,
        memory: MemoryReader | None = None,
    ) -> None:
        self._adapter = adapter
        self._config = config or EngineConfig()
        self._counter = counter
        self._memory = memory or memory_of(adapter.info.device)
        self._admission = Admission(
            Intake(adapter, self._config, counter), min(adapter.eos_token_ids, default=0), counter
        )
        self._store = BatchStore()
        self._runner: Runner | None = None
        self._shape: tuple[int, int, int] | None = None
        self._on_progress: Callable[[], None] | None = None
        self._asleep = False

    def watch(self, on_progress: Callable[[], None]) -> None:
        """Call `on_progress` from within every step from now on, layer by layer."""
        self._on_progress = on_progress
        if self._runner is not None:
            self._runner.pool.watch(on_progress)

    def info(self) -> ShardInfo:
        """Constant facts."""
        facts = self._adapter.info
        return ShardInfo(
            dtype=facts.dtype,
            device_type=facts.device_type,
            attention_impl=facts.attention_impl,
            block_size=self._adapter.kv_layout.block_size,
            use_prefix_caching=self._config.use_prefix_caching,
            support_chunking=self._config.prefill_chunking,
        )

    def facts(self) -> ModelFacts:
        """What is known of the model, and the memory it holds now."""
        info = self._adapter.info
        return ModelFacts(
            quantization=info.quantization,
            vocab_size=info.vocab_size,
            tokenizer_size=self._adapter.tokenizer.vocab_size,
            eos_token_ids=self._adapter.eos_token_ids,
            max_positions=info.max_position_embeddings,
            weight_bytes=info.weight_bytes,
            cache_bytes=0 if self._runner is None else self._runner.pool.nbytes,
        )

    def warmup(
        self,
        requests: Items[Request],
        max_input_tokens: int | None,
        max_prefill_tokens: int,
        max_total_tokens: int | None,
        reserved_bytes: int | None = None,
    ) -> WarmupResult:
        """Run a step, and make the cache. Calling it again starts afresh.

        `requests` are the largest step there may be, which is measured; with `reserved_bytes`, what other models in
        this process are still to touch, they are a short proof.
        Raises: `ConfigError` for limits that contradict each other or the model, `ResourceError` if memory is short.
        """
        if self._asleep:
            raise NotReadyError("the model sleeps: wake it first")
        self._release()
        limits = Limits(max_input_tokens, max_prefill_tokens, max_total_tokens)
        warming = Warming(self._adapter, self._config, self._memory, self._admission, self._make_runner)
        if reserved_bytes is None:
            plan, self._runner = warming.alone(requests, limits)
        else:
            plan, self._runner = warming.beside(requests, limits, reserved_bytes)
        tokens = plan.result.max_total_tokens
        self._shape = plan.num_blocks, max_prefill_tokens, tokens
        with warming.together():
            self._adapter.open_pool(self._runner.pool, self._batch_size, tokens)
        return plan.result

    def go_on_preparing(self) -> bool:
        """Do a small part of what the first steps did not wait for; False if nothing is left."""
        if self._runner is None or self._asleep:
            return False
        self._runner.drop_ahead()  # what prepares may write to the same memory
        return self._adapter.go_on_preparing()

    def turn(self, call: int) -> int:
        """The call that every rank runs next: the `call` that rank 0 asks with. Asked before warm-up and each step."""
        ranks = self._adapter.ranks
        return call if ranks is None else ranks.first_says(call)

    def prefill(self, batch_id: int, requests: Items[Request], cached: CachedBatch | None) -> StepResult:
        """One step for new requests, and for the cached batch's if one is named.

        Raises: `RequestError` if the only request there is cannot be run, `BatchNotFoundError`, and what the model
        raises. A request that cannot be run beside others ends at once, without text, and the others go on.
        """
        start = time.perf_counter_ns()
        if cached is None or cached.id != batch_id:
            self._store.drop(batch_id)
        joined = self._store.take([cached.id]) if cached is not None else []
        runner = self._ready()
        if batch_id == HEALTH_REQUEST_ID:
            return self._liveness(runner, requests)
        if not requests:
            raise RequestError(f"batch {batch_id}: has no requests, expected at least one")
        others = bool(joined) or len(self._store) > 0
        admitted = self._admission.admit(runner, requests, joined, others)
        sequences, refused = admitted.sequences, self._mine(admitted.refused)
        size = runner.pool.layout.block_size
        batches = [*joined, *([make_batch(batch_id, sequences, size)] if sequences else [])]
        if not batches:
            return StepResult(refused, None, StepTimings(0, 0, time.perf_counter_ns() - start))
        joining = time.perf_counter_ns()
        batch = concatenate(batches, size)
        concat_ns = time.perf_counter_ns() - joining if len(batches) > 1 else None
        return self._step(runner, batch, start, concat_ns, refused)

    def decode(self, batch_ids: Items[int]) -> StepResult:
        """One step for the union of the named batches.

        Raises: `RequestError` for an empty list, `BatchNotFoundError`, and what the model raises.
        """
        start = time.perf_counter_ns()
        batches = self._store.take(list(batch_ids))
        runner = self._ready()
        if not batches:
            raise RequestError("Decode: got no batch, expected at least one cached batch id")
        joining = time.perf_counter_ns()
        batch = concatenate(batches, runner.pool.layout.block_size)
        concat_ns = time.perf_counter_ns() - joining if len(batches) > 1 else None
        return self._step(runner, batch, start, concat_ns, [])

    def filter(self, batch_id: int, request_ids: Items[int]) -> CachedBatch:
        """Keep exactly the named requests, in that order. On an error the batch stays as it was.

        Raises: `BatchNotFoundError`; `RequestError` for an empty list or ids that are not in the batch.
        """
        batch = filtered(self._store.get(batch_id), request_ids, self._adapter.kv_layout.block_size)
        self._store.put(batch)
        return batch.cached()

    def clear(self, batch_id: int | None) -> None:
        """Forget one batch, or all; an unknown id is fine."""
        if batch_id is None:
            self._store.drop_all()
        else:
            self._store.drop(batch_id)

    def holds(self, batch_id: int | None) -> bool:
        """True if this batch is cached; None: if any is."""
        return len(self._store) > 0 if batch_id is None else batch_id in self._store

    def requests_of(self, batch_id: int) -> Items[int]:
        """Ids of a cached batch's requests. Raises `BatchNotFoundError`."""
        return self._store.get(batch_id).cached().request_ids

    def discard(self, blocks: Items[int]) -> int:
        """Give back the memory of blocks that hold nothing wanted any more; bytes. They may be written again."""
        runner = self._ready()
        size = runner.pool.layout.block_size
        slots = torch.tensor(list(blocks), dtype=torch.int64)[:, None] * size + torch.arange(size)
        runner.guard.forget(slots.view(-1).to(runner.pool.device))
        return runner.pool.discard(blocks)

    def untouched_bytes(self) -> int:
        """What the cache was promised and has not taken yet."""
        return 0 if self._runner is None else self._runner.pool.untouched_bytes()

    def sleep(self, keep_pages: bool = False) -> int:
        """Give back the pages, unless they are kept, and what the weights take on a device; bytes. `wake` undoes it.

        Batches are dropped. Pages that are given back are forgotten, `wake` makes as many again. Raises
        `ResourceError` if the host has no room for the weights; the engine then serves on.
        """
        runner = self._ready()
        self._check_host_room()
        self._store.drop_all()
        runner.drop_ahead()
        freed = 0
        if keep_pages:
            self._adapter.close_pool()
        else:
            freed = runner.pool.nbytes - runner.pool.untouched_bytes()
            self._release()
        try:
            freed += self._adapter.park_weights(self._tell)
        except BaseException:
            self._open()
            raise
        self._asleep = True
        return freed

    def wake(self) -> None:
        """Have back what `sleep` gave away. Raises `NotReadyError` if it is awake, `ResourceError` without room."""
        if not self._asleep:
            raise NotReadyError("the model does not sleep")
        self._adapter.restore_weights(self._tell)
        self._open()
        self._asleep = False

    def _open(self) -> None:
        """Make the cache again if it is gone, as large as it was, and what decodes over it."""
        assert self._shape is not None, "it was warmed up"
        num_blocks, prefill_tokens, tokens = self._shape
        if self._runner is None:
            self._runner = self._make_runner(num_blocks, prefill_tokens)
        self._adapter.open_pool(self._runner.pool, self._batch_size, tokens)

    def _check_host_room(self) -> None:
        """Raise `ResourceError` where weights would move to the host and cannot."""
        info = self._adapter.info
        if info.device_type == "cpu":
            return
        room = memory_of("cpu").available_bytes() // self._config.world_size
        if info.weight_bytes > room:
            raise ResourceError(
                f"host memory: weights of {info.weight_bytes} bytes are to sleep there, {room} are available; drop them"
            )

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress()

    @property
    def _batch_size(self) -> int:
        return self._config.max_batch_size or DEFAULT_BATCH_SIZE

    def health(self) -> None:
        """Ask the device for a little memory and the cache for its integrity; raises if either fails."""
        torch.zeros(2, 2, device=self._adapter.info.device).sum().item()
        if self._runner is not None:
            self._runner.pool.check_integrity()

    def close(self) -> None:
        """Give back cache and model."""
        self._release()
        self._adapter.close()

    def _step(
        self, runner: Runner, batch: Batch, start: int, concat_ns: int | None, refused: list[Generation]
    ) -> StepResult:
        stepped = self._run(runner, batch)
        if stepped.batch is not None:
            self._store.put(stepped.batch)
        timings = stepped.timings(time.perf_counter_ns() - start, concat_ns)
        cached = None if stepped.batch is None else stepped.batch.cached()
        return StepResult([*refused, *stepped.generations], cached, timings)

    def _liveness(self, runner: Runner, requests: Items[Request]) -> StepResult:
        """The router's one-token request on block 0: it ends here and joins no batch."""
        start = time.perf_counter_ns()
        if len(requests) != 1 or requests[0].id != HEALTH_REQUEST_ID:
            raise RequestError(
                f"batch {HEALTH_REQUEST_ID} is the liveness batch; got requests {[r.id for r in requests]}, expected "
                "one of the same id"
            )
        request = replace(requests[0], stop=replace(requests[0].stop, max_new_tokens=1))
        sequences = self._admission.admit(runner, [request], [], others=False).sequences
        stepped = self._run(runner, make_batch(HEALTH_REQUEST_ID, sequences, runner.pool.layout.block_size))
        return StepResult(stepped.generations, None, stepped.timings(time.perf_counter_ns() - start, None))

    def _run(self, runner: Runner, batch: Batch) -> Stepped:
        ranks = self._adapter.ranks
        try:
            return runner.run(batch)
        except torch.AcceleratorError as error:  # nothing works on that device any more
            raise DeviceError(f"{self._adapter.info.device} failed: {str(error).splitlines()[0]}") from error
        finally:
            if ranks is not None:
                ranks.check()  # without one of them, the step gave nonsense

    def _mine(self, generations: Items[Generation]) -> list[Generation]:
        """Those that this rank reports."""
        rank, world = self._config.rank, self._config.world_size
        return [g for g in generations if g.request_id % world == rank]

    def _make_runner(self, num_blocks: int, max_prefill_tokens: int) -> Runner:
        pool = KVPool(self._adapter.kv_layout, num_blocks, self._adapter.info.device)
        if self._on_progress is not None:
            pool.watch(self._on_progress)
        return Runner(self._adapter, pool, self._config, self._counter, max_prefill_tokens)

    def _ready(self) -> Runner:
        if self._asleep:
            raise NotReadyError("the model sleeps: wake it first")
        if self._runner is None:
            raise NotReadyError("the cache does not exist yet: Warmup must succeed before Prefill and Decode")
        return self._runner

    def _release(self) -> None:
        self._store.drop_all()
        if self._runner is not None:
            self._adapter.close_pool()
            self._runner.pool.close()
        self._runner = None
