"""RMS norm on an NVIDIA GPU: one block a row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Kernel, Programs, spec
from deepseek_tgi.kernels.rms_norm import check_rms_norm

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

THREADS = (64, 128, 256, 512)
RUN = 8
"""Elements a thread reads at once."""


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    return replace(kernels, rms_norm=CudaRmsNorm(machine_of(kernels.device).programs, kernels.activation_dtype))


class CudaRmsNorm:
    """The op over the kernels of one device; a fresh `out` has the activation dtype."""

    def __init__(self, programs: Programs, activation: torch.dtype) -> None:
        self._programs = programs
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the contract."""
        check_rms_norm(x, weight, out, dtypes=ACTIVATIONS)
        if out is None:
            out = torch.empty(x.shape, dtype=self._activation, device=x.device)
        if x.dim() == 2:
            self._rows(x, weight, eps, out)
        else:
            for head in range(x.shape[1]):
                self._rows(x[:, head], weight, eps, out[:, head])
        return out

    def _rows(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        rows, width = x.shape
        if not rows:
            return
        runs = 0
        threads = THREADS[-1] if width > 1024 else THREADS[1]
        if width % RUN == 0 and all(_on_boundaries(tensor) for tensor in (x, weight, out)):
            threads = next((count for count in THREADS if count * RUN >= width), THREADS[-1])
            runs = -(-width // (threads * RUN))
        arguments = (x, x.stride(0), weight, eps, out, out.stride(0), width)
        self._kernel(x.dtype, out.dtype, threads, runs)((rows, 1, 1), threads, arguments, overlap=True)

    def _kernel(self, given: torch.dtype, made: torch.dtype, threads: int, runs: int) -> Kernel:
        narrow = torch.bfloat16
        return self._programs.kernel(
            spec(
                "rms_norm", "rms_norm", "plpfpli",
                THREADS=threads, RUNS=runs, X_BF16=int(given is narrow), OUT_BF16=int(made is narrow),
            )
        )  # fmt: skip


def _on_boundaries(tensor: torch.Tensor) -> bool:
    """True if every row begins on a 16-byte boundary."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and (tensor.dim() == 1 or tensor.stride(0) * size % 16 == 0)
