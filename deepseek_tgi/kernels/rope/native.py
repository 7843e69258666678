"""Rotary embedding on the C++ library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.library import NativeLibrary
from deepseek_tgi.kernels.rope import check_rope


@dataclass(frozen=True, slots=True)
class RopeOp:
    """The op over one library."""

    library: NativeLibrary
    num_threads: int

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """See the contract."""
        check_rope(q, k, positions, cos_sin)
        self.library.pass_handle(q.numel() + k.numel()).dstgi_rope(
            q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), q.shape[0], q.shape[1], k.shape[1],
            q.shape[2], k.shape[2], q.stride(0), k.stride(0), cos_sin.shape[1], self.num_threads,
        )  # fmt: skip
