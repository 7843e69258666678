"""Row lookup on an NVIDIA GPU: one launch, which lets the first product begin to read its weight."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import PackedDense, PlainDense
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Programs, spec
from deepseek_tgi.kernels.embedding import check_embedding

if TYPE_CHECKING:
    from deepseek_tgi.kernels.embedding import Embedding
    from deepseek_tgi.kernels.select import KernelSet

THREADS, RUN = 128, 8
"""Of a block, and elements of each."""
_MOST_IDS = 65535
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    return replace(kernels, embedding=CudaEmbedding(machine_of(kernels.device).programs, kernels.embedding))


class CudaEmbedding:
    """The op over one device's programs; tables that the kernel does not read go to `others`."""

    def __init__(self, programs: Programs, others: Embedding) -> None:
        self._programs = programs
        self._others = others

    def __call__(self, ids: torch.Tensor, table: torch.Tensor | PackedDense) -> torch.Tensor:
        """See the contract."""
        rows = table.weight if isinstance(table, PlainDense) else table
        if not isinstance(rows, torch.Tensor) or not 0 < ids.shape[0] <= _MOST_IDS or not _fits(rows):
            return self._others(ids, table)
        check_embedding(ids, rows.shape[0])
        ids, width = ids.contiguous(), rows.shape[1]
        out = torch.empty(ids.shape[0], width, device=rows.device)
        kernel = self._programs.kernel(spec("embedding", "embedding", "pppi", THREADS=THREADS, KIND=_KINDS[rows.dtype]))
        grid = (-(-width // (THREADS * RUN)), ids.shape[0], 1)
        kernel(grid, THREADS, (ids, rows, out, width), overlap=True)
        return out


def _fits(rows: torch.Tensor) -> bool:
    """Whether the kernel can read the table."""
    vectors = rows.dim() == 2 and rows.is_contiguous() and rows.shape[1] % RUN == 0 and rows.data_ptr() % 16 == 0
    return vectors and rows.dtype in _KINDS
