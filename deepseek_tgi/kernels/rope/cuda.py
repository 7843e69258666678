"""Rotary embedding on an NVIDIA GPU: one block a token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Programs, spec
from deepseek_tgi.kernels.rope import check_rope

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    return replace(kernels, rope=CudaRope(machine_of(kernels.device).programs))


class CudaRope:
    """The op over the kernels of one device."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """See the contract."""
        check_rope(q, k, positions, cos_sin, dtypes=ACTIVATIONS)
        if len(q):
            kernel = self._programs.kernel(spec("rope", "rope", "pliipliippi", BF16=int(q.dtype is torch.bfloat16)))
            heads = (part for x in (q, k) for part in (x, x.stride(0), x.shape[1], x.shape[2]))
            kernel((len(q), 1, 1), 256, (*heads, positions, cos_sin, cos_sin.shape[1] // 2), overlap=True)
