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
_BOUNDARY_BYTES = 16


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    return replace(kernels, rms_norm=CudaRmsNorm(machine_of(kernels.device).programs, kernels.activation_dtype))


class CudaRmsNorm:
    """The op over the kernels of one device; a fresh `out` has the activation dtype."""

    def __init__(self, programs: Programs, activation: torch.dtype) -> None:
        self._programs = programs
        self._activation = activation
        self._kernels: dict[tuple[int, torch.dtype, torch.dtype, bool], tuple[Kernel, int]] = {}

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
        x_row, out_row = x.stride(0), out.stride(0)
        places = x.data_ptr() | weight.data_ptr() | out.data_ptr()
        steps = x_row * x.element_size() | out_row * out.element_size()
        in_runs = not (width % RUN or (places | steps) % _BOUNDARY_BYTES)
        key = width, x.dtype, out.dtype, in_runs
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._kernel(width, x.dtype, out.dtype, in_runs)
        kernel, threads = found
        kernel((rows, 1, 1), threads, (x, x_row, weight, eps, out, out_row, width), overlap=True)

    def _kernel(self, width: int, given: torch.dtype, made: torch.dtype, in_runs: bool) -> tuple[Kernel, int]:
        """The kernel and its threads; `in_runs` where every row begins on a boundary and is of whole runs."""
        runs, narrow = 0, torch.bfloat16
        threads = THREADS[-1] if width > 1024 else THREADS[1]
        if in_runs:
            threads = next((count for count in THREADS if count * RUN >= width), THREADS[-1])
            runs = -(-width // (threads * RUN))
        kernel = self._programs.kernel(
            spec(
                "rms_norm", "rms_norm", "plpfpli",
                THREADS=threads, RUNS=runs, X_BF16=int(given is narrow), OUT_BF16=int(made is narrow),
            )
        )  # fmt: skip
        return kernel, threads
