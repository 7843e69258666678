"""Gated activation on an NVIDIA GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Programs, spec
from deepseek_tgi.kernels.silu_mul import check_silu_mul

THREADS, EIGHT = 128, 8

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    return replace(kernels, silu_mul=CudaSiluMul(machine_of(kernels.device).programs))


class CudaSiluMul:
    """The op over the kernels of one device."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See the contract."""
        check_silu_mul(gate_up, out, dtypes=ACTIVATIONS)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if out is None:
            out = gate_up.new_empty(rows, width)
        if rows:
            narrow = gate_up.dtype is torch.bfloat16
            aligned = width % EIGHT == 0 and gate_up.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
            eight = narrow and aligned
            kernel = self._programs.kernel(spec("silu_mul", "silu_mul", "ppi", BF16=int(narrow), EIGHT=int(eight)))
            each = THREADS * (EIGHT if eight else 1)
            kernel((-(-width // each), rows, 1), THREADS, (gate_up, out, width), overlap=True)
        return out
