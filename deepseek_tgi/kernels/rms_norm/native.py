"""RMS norm on the C++ library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.library import NativeLibrary
from deepseek_tgi.kernels.rms_norm import check_rms_norm


@dataclass(frozen=True, slots=True)
class RmsNormOp:
    """The op over one library."""

    library: NativeLibrary
    num_threads: int

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the contract."""
        check_rms_norm(x, weight, out)
        y = torch.empty(x.shape) if out is None else out
        heads = x.shape[1] if x.dim() == 3 else 1
        x_head, y_head = (x.stride(1), y.stride(1)) if x.dim() == 3 else (0, 0)
        self.library.pass_handle(x.numel()).dstgi_rms_norm(
            x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], heads, x.shape[-1], x.stride(0), x_head,
            y.stride(0), y_head, eps, self.num_threads,
        )  # fmt: skip
        return y
