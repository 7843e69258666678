"""Cache write in CUDA C++, as `cuda/sources/kv_write.cu` explains."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.heads import STORED_MODES, HeadWriter, Turns
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.kv_write import KvWrite, check_kv_write
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)


def provide(kernels: KernelSet) -> KernelSet:
    """Writes on CUDA C++; formats that it does not know as before."""
    return replace(kernels, kv_write=KvWriteOp(HeadWriter(machine_of(kernels.device).programs), kernels.kv_write))


class KvWriteOp:
    """The op: what the kernel does not take goes to `others`, which is said once."""

    def __init__(self, writer: HeadWriter, others: KvWrite) -> None:
        self._writer = writer
        self._others = others
        self._said = False

    def __call__(
        self,
        pages: LayerPages,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        placed: PlacedFrame | None = None,
    ) -> None:
        """See the contract."""
        check_kv_write(pages, k, v, slots, placed, dtypes=ACTIVATIONS)
        if pages.mode not in STORED_MODES:
            if not self._said:
                self._said = True
                logger.warning("kv_write: no CUDA kernel for %s; another does the work, which is slower", pages.mode)
            self._others(pages, k, v, slots, placed)
            return
        turns, frame = None, None
        if placed is not None:
            turns, frame = Turns(placed.positions, placed.cos_sin, rotates=False), placed.frame
        self._writer(None, k, v, pages, slots, turns=turns, frame=frame)
