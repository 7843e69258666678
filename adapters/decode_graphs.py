"""Decode steps of fixed batch sizes, recorded once and replayed: a step then costs one launch instead of hundreds.

Choice: one graph a batch size (`buckets`), over inputs at fixed addresses that are written before each replay; a batch
takes the smallest recorded bucket it fits in, and the rows that are over write nothing. Contexts may be as long as the
block tables are wide: kernels divide the lengths they find on the device. Prevents: a host that is slower than the
GPU, and a graph for every length. Rejected: graphs of whole lengths (memory), padding to powers of two alone (up to
half of a step's rows for nothing).

The likeliest token of each row is found in the same graph: nearly every request wants it, and what changes logits
comes after.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deepseek_tgi.adapters.staging import PinnedRing
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.best_token import best_token_on, token_ids_on
from deepseek_tgi.kernels.best_token.reference import best_token

FIRST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Recorded before a model is ready: twice as many rows as needed at worst, until the others are there."""
_STEPS = ((8, 1), (16, 2), (32, 4), (64, 8), (128, 16), (256, 32))
"""Up to so many rows, a bucket every so many: at most a fifth of a step's rows are padding."""
_ROW_BYTES, _OFFSETS = 24, (0, 8, 16, 20)
"""Of ids, slots, positions and cached lengths, and where each begins, in rows."""

Replay = Callable[[], None]


class Capture(Protocol):
    """Records what `run` does on the device, so that calling the result does it again at the same addresses."""

    def __call__(self, run: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """CUDA graphs over one memory pool. Each work is run once before it is recorded, which builds its kernels."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream, self._turn = _stream_for(device)

    def __call__(self, run: Callable[[], None]) -> Replay:
        """See `Capture`."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._stream.device)
        with self._turn, torch.cuda.stream(self._stream):
            self._stream.wait_stream(current)
            run()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


_STREAMS: dict[torch.device, tuple[torch.cuda.Stream, threading.Lock]] = {}
_MAKING = threading.Lock()


def _stream_for(device: torch.device) -> tuple[torch.cuda.Stream, threading.Lock]:
    """The stream that all recording on `device` goes through, and whose turn it is.

    One for all models: cuBLAS keeps 32 MiB for every stream it was ever used on.
    """
    with _MAKING:
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device), threading.Lock()  # type: ignore[no-untyped-call]
        return _STREAMS[device]


def usual_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes worth a graph where up to `most` requests decode together."""
    sizes: list[int] = []
    start = 1
    for stop, step in _STEPS:
        sizes += range(start if step == 1 else start + step - 1, stop + 1, step)
        start = stop + 1
    return tuple(size for size in sizes if size < most) + ((most,) if most <= _STEPS[-1][0] else ())


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What graphs are for: batch sizes, columns of the block tables, tokens a block, rows of the vocabulary."""

    buckets: Sequence[int]
    columns: int
    block_size: int
    vocab_size: int

    @property
    def largest(self) -> int:
        """Rows of the largest bucket."""
        return max(self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of the fixed inputs and outputs."""
        return self.largest * (_ROW_BYTES + 4 * self.columns + 4 * self.vocab_size + 12) + 4 * (self.largest + 1)


class DecodeGraphs:
    """Owner of the recorded steps of one model over one pool, and of their inputs and outputs. For one thread."""

    def __init__(
        self,
        spec: GraphSpec,
        step: Callable[[ForwardInputs, torch.Tensor], None],
        device: torch.device,
        capture: Capture,
    ) -> None:
        """`step(inputs, logits)` takes a step on the device and writes its logits to `logits [n, V]`."""
        self._spec = spec
        self._step = step
        self._capture = capture
        self._take_ids = token_ids_on(device)
        self._find_best = best_token_on(device) or best_token
        self._left = _in_order(spec.buckets)
        self._replays: dict[int, Replay] = {}
        self._rows = _Rows(spec.largest, device)
        self._tables = torch.zeros(spec.largest, spec.columns, dtype=torch.int32, device=device)
        self._held: tuple[torch.Tensor, int] | None = None
        self._offsets = torch.arange(spec.largest + 1, dtype=torch.int32, device=device)
        self._order = torch.arange(spec.largest, device=device)
        self._logits = torch.zeros(spec.largest, spec.vocab_size, device=device)
        self._best = torch.zeros(3 * spec.largest, device=device)
        self._results: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        """By rows of a step: the bucket they go to, their logits, their best tokens."""
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def recorded(self) -> Sequence[int]:
        """Batch sizes that can be replayed, ascending."""
        return sorted(self._replays)

    def record_next(self) -> bool:
        """Record one more bucket; False if none is left."""
        if not self._left:
            return False
        size = self._left.pop(0)
        self._rows.blank()
        inputs, logits, best = self._inputs(size), self._logits[:size], self._best[: 3 * size].view(3, size)
        self._given = None
        self._results.clear()

        def step() -> None:
            self._step(inputs, logits)
            self._find_best(logits, best)

        self._replays[size] = self._capture(step)
        return True

    def record_first(self) -> None:
        """Record what a model needs to be ready."""
        for _ in range(sum(size in FIRST_BUCKETS or size == self._spec.largest for size in self._left)):
            self.record_next()

    def bucket(self, num_rows: int) -> int | None:
        """The smallest recorded batch size of at least `num_rows`."""
        return min((size for size in self._replays if size >= num_rows), default=None)

    def run(self, inputs: ForwardInputs, token_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits of `inputs`, host tensors, if they are a decode step that fits a bucket; else None.

        They are overwritten by the next step. `token_ids`, which lie on the device, replace the inputs' own.
        """
        count = inputs.cache_lens.shape[0]
        decodes = inputs.max_seqlen == 1 and inputs.input_ids.shape[0] == count == inputs.logit_rows.shape[0]
        fits = inputs.max_context <= self._spec.columns * self._spec.block_size
        result = self._result(count) if decodes and fits else None
        if result is None:
            return None
        size, logits, best = result
        self._place_tables(inputs.block_tables)
        self._rows.place(inputs, size)
        if token_ids is not None:
            self._take_ids(token_ids, self._rows.ids[:count], self._spec.vocab_size)
        self._replays[size]()
        self._given = logits, best
        return logits

    def best_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """`best_token` of what the last `run` returned; None for any other logits."""
        given = self._given
        return given[1] if given is not None and given[0] is logits else None

    def _result(self, count: int) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """Where a step of `count` rows goes and what comes of it, worked out once."""
        found = self._results.get(count)
        if found is None:
            size = self.bucket(count)
            if size is None:
                return None
            best = self._best[: 3 * size].view(3, size)[:, :count]
            found = self._results[count] = size, self._logits[:count], best
        return found

    def _place_tables(self, tables: torch.Tensor) -> None:
        """Write the block tables, unless they are those of the last step, untouched."""
        held = self._held
        if held is not None and held[0] is tables and held[1] == tables._version:
            return
        rows, columns = tables.shape[0], min(tables.shape[1], self._spec.columns)
        self._tables[:rows, :columns].copy_(tables[:, :columns])
        self._held = tables, tables._version

    def _inputs(self, size: int) -> ForwardInputs:
        rows = self._rows
        return ForwardInputs(
            input_ids=rows.ids[:size],
            positions=rows.positions[:size],
            slots=rows.slots[:size],
            cu_seqlens=self._offsets[: size + 1],
            block_tables=self._tables[:size],
            cache_lens=rows.cache_lens[:size],
            logit_rows=self._order[:size],
            max_seqlen=1,
            max_context=self._spec.columns * self._spec.block_size,
        )


class _Rows:
    """What changes with every step, at fixed addresses: ids, slots, positions and cached lengths of all rows."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._memory = torch.zeros(num_rows * _ROW_BYTES, dtype=torch.uint8, device=device)
        self._ring = PinnedRing(device)
        self._num_rows = num_rows
        self.ids, self.slots, self.positions, self.cache_lens = _columns(self._memory, num_rows)

    def blank(self) -> None:
        """Rows that write nothing."""
        with self._ring.stretch(self._memory.numel()) as host:
            _blank(_columns(host, self._num_rows), 0, self._num_rows)
            self._memory.copy_(host, non_blocking=True)

    def place(self, inputs: ForwardInputs, size: int) -> None:
        """Write the rows of a step of `size` rows; those that are over write nothing."""
        with self._ring.stretch(self._memory.numel()) as host:
            start, count = host.data_ptr(), inputs.input_ids.shape[0]
            for offset, values in zip(_OFFSETS, _given(inputs), strict=True):
                dense = values.contiguous()
                ctypes.memmove(start + offset * self._num_rows, dense.data_ptr(), dense.nbytes)
            if count < size:
                _blank(_columns(host, self._num_rows), count, size)
            self._memory.copy_(host, non_blocking=True)


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _given(inputs: ForwardInputs) -> Columns:
    return inputs.input_ids, inputs.slots, inputs.positions, inputs.cache_lens


def _columns(memory: torch.Tensor, num_rows: int) -> Columns:
    """Ids and slots, int64, then positions and cached lengths, int32, of `memory`."""
    wide, narrow = memory[: 16 * num_rows].view(torch.int64), memory[16 * num_rows :].view(torch.int32)
    return wide[:num_rows], wide[num_rows:], narrow[:num_rows], narrow[num_rows:]


def _blank(columns: Columns, start: int, stop: int) -> None:
    ids, slots, positions, cache_lens = columns
    for column in (ids, positions, cache_lens):
        column[start:stop].zero_()
    slots[start:stop].fill_(-1)


def _in_order(buckets: Sequence[int]) -> list[int]:
    """What is needed first, largest before smaller ones: those then fit into memory that it left."""
    first = [size for size in buckets if size in FIRST_BUCKETS or size == max(buckets)]
    rest = [size for size in buckets if size not in first]
    return sorted(set(first), reverse=True) + sorted(set(rest), reverse=True)
