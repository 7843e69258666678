"""A model's steps on a GPU: inputs checked and moved, decoding replayed from graphs where it can be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_tgi.adapters.decode_graphs import Capture, CudaCapture, DecodeGraphs, GraphSpec, usual_buckets
from deepseek_tgi.adapters.models.decoder import Decoder
from deepseek_tgi.adapters.parking import DeviceMemory, ParkedWeights, storages_of
from deepseek_tgi.adapters.staging import InputStage, check_slots, check_values
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.device_set import syncing_ops
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.pool import KVPool, LayerByLayer

logger = logging.getLogger(__name__)

GRAPH_BYTES = 8 << 20
"""What the driver keeps of one recorded step, about, and its part of the shared memory."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What steps are taken with. `buckets` are the batch sizes to record, None for the usual ones."""

    decoder: Decoder
    kernels: KernelSet
    vocab_size: int
    block_size: int
    buckets: tuple[int, ...] | None = None

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
        self._parked: ParkedWeights | None = None

    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        """Logits on the device; those of a replayed step are overwritten by the next one."""
        check_values(inputs, self._model.vocab_size, pool.num_slots)
        self._choose_device()
        logits = self._graphs.run(inputs) if self._graphs is not None and pool is self._pool else None
        if logits is not None:
            return logits
        return self._model.decoder.step(self._stage.move(inputs), LayerByLayer(pool))

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
        if spec is None:
            why = (
                f"{', '.join(sorted(self._model.syncing))} ask for values" if self._model.syncing else "none are wished"
            )
            logger.info("decode steps are not recorded in graphs: %s", why)
            return
        self._choose_device()
        decoder, pages, scratch = self._model.decoder, LayerByLayer(pool), self._model.decoder.scratch(spec.largest)

        def step(inputs: ForwardInputs, logits: torch.Tensor) -> None:
            made = decoder.step(inputs, pages, scratch, logits)
            if made is not logits:  # put together from the ranks'
                logits.copy_(made)

        graphs = DecodeGraphs(spec, step, self._device, self._make_capture(self._device))
        try:
            graphs.record_first()
            while decoder.several_ranks and graphs.record_next():
                pass  # all ranks record together, now or never
        except (RuntimeError, GenerationError) as error:
            logger.warning("decode steps are not recorded in graphs, and slower: %s", str(error).splitlines()[0])
            return
        self._pool, self._graphs = pool, graphs
        logger.info(
            "decode steps recorded for batches of %s; %d more sizes follow when there is time",
            ", ".join(map(str, graphs.recorded)), len(spec.buckets) - len(graphs.recorded),
        )  # fmt: skip

    def go_on_preparing(self) -> bool:
        """Record one more batch size; False if none is left."""
        if self._graphs is None:
            return False
        self._choose_device()
        return self._graphs.record_next()

    def close_pool(self) -> None:
        """Forget the graphs over the pool that was open."""
        self._pool = self._graphs = None

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
        return spec.nbytes + step + GRAPH_BYTES * len(spec.buckets)

    def _choose_device(self) -> None:
        """A thread begins on the first GPU, and may have been on another since."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            torch.cuda.set_device(self._device)
