"""A model's steps on a GPU: inputs checked and moved, decoding replayed from graphs where it can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from deepseek_tgi.adapters.decode_graphs import Capture, CudaCapture, DecodeGraphs, GraphSpec, usual_buckets
from deepseek_tgi.adapters.models.decoder import Decoder
from deepseek_tgi.adapters.parallel import RankGroup
from deepseek_tgi.adapters.parking import DeviceMemory, ParkedWeights, storages_of
from deepseek_tgi.adapters.prompt_graphs import PromptGraphs, sizes_up_to
from deepseek_tgi.adapters.staging import InputStage, check_slots, check_values
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import DeviceError, GenerationError
from deepseek_tgi.kernels.device_set import syncing_ops
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.pool import KVPool, LayerByLayer

logger = logging.getLogger(__name__)

GRAPH_BYTES = 8 << 20
"""What the driver keeps of one recorded step, about, and its part of the shared memory."""
PROMPT_BYTES = 16 << 20
"""The same of a prompt's size, which is many graphs."""
ANOTHER_RANK = "another rank cannot record them"
STRETCHES = 8
"""Of short prompts that are recorded at once, in some 16 ms: who comes meanwhile waits, and at most 20 times a second
there is a gap to record in.
"""
PROMPTS_PLAIN = "short prompts are not recorded in graphs, and slower: %s"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What steps are taken with. `buckets` are the batch sizes to record, None for the usual ones."""

    decoder: Decoder
    kernels: KernelSet
    vocab_size: int
    block_size: int
    buckets: tuple[int, ...] | None = None
    group: RankGroup | None = None

    def spec(self, max_requests: int, max_tokens: int) -> GraphSpec | None:
        """Graphs worth recording; None if there are to be none, or kernels ask the device for values."""
        buckets = usual_buckets(max_requests) if self.buckets is None else tuple(sorted(set(self.buckets)))
        if not buckets or self.syncing:
            return None
        return GraphSpec(buckets, -(-max_tokens // self.block_size), self.block_size, self.vocab_size)

    @property
    def syncing(self) -> frozenset[str]:
        """Ops of this model that no graph can hold."""
        return syncing_ops(self.kernels) & self.decoder.ops


class GpuSteps:
    """Owner of what moves inputs to the device, of the graphs over the one pool that is open, and of parked weights.

    For one thread.
    """

    def __init__(
        self, model: GpuModel, device: torch.device, make_capture: Callable[[torch.device], Capture] = CudaCapture
    ) -> None:
        self._model = model
        self._device = device
        self._make_capture = make_capture
        self._stage = InputStage(device)
        self._pool: KVPool | None = None
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        self._room = 0
        """Memory that recorded prompts may still take."""
        self._parked: ParkedWeights | None = None

    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        """Logits on the device; those of a replayed step are overwritten by the next one."""
        check_values(inputs, self._model.vocab_size, pool.num_slots)
        self._choose_device()
        logits = self._graphs.run(inputs) if self._graphs is not None and pool is self._pool else None
        if logits is not None:
            return logits
        moved, pages = self._stage.move(inputs), LayerByLayer(pool)
        logits = self._prompts.run(moved, pages) if self._prompts is not None else None
        return self._model.decoder.step(moved, pages) if logits is None else logits

    def step_with(self, inputs: ForwardInputs, token_ids: torch.Tensor, pool: KVPool) -> torch.Tensor | None:
        """See `ModelAdapter.step_with`."""
        if self._graphs is None or pool is not self._pool:
            return None
        check_slots(inputs, pool.num_slots)
        self._choose_device()
        return self._graphs.run(inputs, token_ids)

    def best_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """See `ModelAdapter.best_of`."""
        return None if self._graphs is None else self._graphs.best_of(logits)

    def open_pool(self, pool: KVPool, max_requests: int, max_tokens: int) -> None:
        """See `ModelAdapter.open_pool`."""
        self.close_pool()
        spec = self._model.spec(max_requests, max_tokens)
        wanted = self._agreed(spec is not None)
        if spec is None or not wanted:
            syncing = ", ".join(sorted(self._model.syncing))
            why = f"{syncing} ask for values" if syncing else "none are wished" if spec is None else ANOTHER_RANK
            logger.info("decode steps are not recorded in graphs: %s", why)
            return
        try:
            graphs = self._on_all(partial(self._made, spec, pool))
            if self._model.group is None:
                graphs.record_first()
            while self._model.group is not None and self._on_all(graphs.record_next):
                pass  # all ranks record together, now or never
        except DeviceError:
            raise
        except (RuntimeError, GenerationError) as error:
            logger.warning("decode steps are not recorded in graphs, and slower: %s", str(error).splitlines()[0])
            return
        self._pool, self._graphs = pool, graphs
        self._prompts = self._opened_prompts(sizes_up_to(max_requests * max_tokens))
        logger.info(
            "decode steps recorded for batches of %s; %d more sizes follow when there is time",
            ", ".join(map(str, graphs.recorded)), len(spec.buckets) - len(graphs.recorded),
        )  # fmt: skip

    def _made(self, spec: GraphSpec, pool: KVPool) -> DecodeGraphs:
        """Graphs of which none is recorded."""
        self._choose_device()
        decoder, pages, scratch = self._model.decoder, LayerByLayer(pool), self._model.decoder.scratch(spec.largest)
        group, taken = self._model.group, set[int]()

        def step(inputs: ForwardInputs, logits: torch.Tensor) -> None:
            # Other ranks' GPUs wait for the first step of a size; what is recorded then waits for nobody.
            first = group is not None and inputs.logit_rows.shape[0] not in taken
            with group.together() if group is not None and first else nullcontext():
                made = decoder.step(inputs, pages, scratch, logits)
            taken.add(inputs.logit_rows.shape[0])
            if made is not logits:  # put together from the ranks'
                logits.copy_(made)

        return DecodeGraphs(spec, step, self._device, self._make_capture(self._device))

    def _opened_prompts(self, sizes: Sequence[int]) -> PromptGraphs | None:
        """The same for steps with prompts; None if they are launched as ever."""
        group = self._model.group
        try:
            prompts = self._on_all(partial(self._made_for_prompts, sizes))
            self._room = self._prompt_bytes(sizes)
            while group is not None and self._on_all(partial(self._record_stretch, prompts)):
                pass
        except DeviceError:
            raise
        except (RuntimeError, GenerationError) as error:
            logger.warning(PROMPTS_PLAIN, str(error).splitlines()[0])
            return None
        return prompts

    def _made_for_prompts(self, sizes: Sequence[int]) -> PromptGraphs:
        self._choose_device()
        group = self._model.group
        guard = nullcontext if group is None else group.together
        return PromptGraphs(self._model.decoder, sizes, self._device, self._make_capture(self._device), guard)

    def _on_all(self, work: Callable[[], T]) -> T:
        """What `work` returns. If it fails on one rank, none goes on: ranks that replay a step and ranks that take it
        as it is add up different sizes.

        Raises: its error, or `GenerationError` for another rank's.
        """
        try:
            made = work()
        except DeviceError:
            raise
        except (RuntimeError, GenerationError):
            self._agreed(False)
            raise
        if not self._agreed(True):
            raise GenerationError(ANOTHER_RANK)
        return made

    def _agreed(self, able: bool) -> bool:
        """True if all ranks are able."""
        group = self._model.group
        return able if group is None else bool(group.smallest(int(able)))

    def go_on_preparing(self) -> bool:
        """Record one more batch size, or a few stretches of short prompts; False if none is left."""
        if self._graphs is None:
            return False
        self._choose_device()
        return self._graphs.record_next() or all(self._record_prompts() for _ in range(STRETCHES))

    def _record_prompts(self) -> bool:
        """One more stretch of short prompts; what cannot be recorded is launched as ever."""
        try:
            return self._prompts is not None and self._record_stretch(self._prompts)
        except DeviceError:
            raise
        except (RuntimeError, GenerationError) as error:
            logger.warning(PROMPTS_PLAIN, str(error).splitlines()[0])
            self._prompts = None
            return False

    def _record_stretch(self, prompts: PromptGraphs) -> bool:
        """The same for any. Raises `GenerationError` if it took more memory than was planned."""
        before = self._reserved_bytes()
        more = prompts.record_next()
        self._room -= self._reserved_bytes() - before
        if self._room < 0:
            raise GenerationError(f"they take {-self._room / 1e6:.0f} MB more than was planned")
        return more

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def close_pool(self) -> None:
        """Forget the graphs over the pool that was open."""
        self._pool = self._graphs = self._prompts = None

    def park(self, told: Callable[[], None]) -> int:
        """See `ModelAdapter.park_weights`."""
        weights = self._model.decoder.weights
        storages = storages_of(weights, (self._model.kernels, weights.head.group), self._device)
        parked = ParkedWeights(storages, DeviceMemory(self._device))
        freed = parked.park(told)
        self._parked = parked
        return freed

    def restore(self, told: Callable[[], None]) -> None:
        """See `ModelAdapter.restore_weights`."""
        if self._parked is not None:
            self._parked.restore(told)
            self._parked = None

    def overhead_bytes(self, max_requests: int, max_tokens: int) -> int:
        """See `ModelAdapter.pool_overhead_bytes`."""
        spec = self._model.spec(max_requests, max_tokens)
        if spec is None:
            return 0
        step = self._model.decoder.workspace_bytes(spec.largest, 0)
        prompts = self._prompt_bytes(sizes_up_to(max_requests * max_tokens))
        return spec.nbytes + step + GRAPH_BYTES * len(spec.buckets) + prompts

    def _prompt_bytes(self, sizes: Sequence[int]) -> int:
        return self._model.decoder.workspace_bytes(max(sizes), 0) + PROMPT_BYTES * len(sizes)

    def _choose_device(self) -> None:
        """A thread begins on the first GPU, and may have been on another since."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            torch.cuda.set_device(self._device)
