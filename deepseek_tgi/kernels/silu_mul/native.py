"""Gated activation on the C++ library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.library import NativeLibrary
from deepseek_tgi.kernels.silu_mul import check_silu_mul


@dataclass(frozen=True, slots=True)
class SiluMulOp:
    """The op over one library."""

    library: NativeLibrary
    num_threads: int

    def __call__(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See the contract."""
        check_silu_mul(gate_up, out)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(rows, width) if out is None else out
        call = self.library.pass_handle(gate_up.numel())
        call.dstgi_silu_mul(gate_up.data_ptr(), y.data_ptr(), rows, width, self.num_threads)
        return y
