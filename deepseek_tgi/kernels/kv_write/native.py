"""Cache write on the C++ library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.kv_write import check_kv_write
from deepseek_tgi.kernels.library import QUANTISED_COST, NativeLibrary
from deepseek_tgi.kernels.native_frame import native_frame
from deepseek_tgi.kernels.native_pages import native_pages
from deepseek_tgi.kernels.pages import LayerPages


@dataclass(frozen=True, slots=True)
class KvWriteOp:
    """The op over one library."""

    library: NativeLibrary
    num_threads: int

    def __call__(
        self,
        pages: LayerPages,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        placed: PlacedFrame | None = None,
    ) -> None:
        """See the contract."""
        check_kv_write(pages, k, v, slots, placed)
        for name, x in (("k", k), ("v", v)):
            if x.stride(2) != 1:
                refuse(f"kv_write: {describe(name, x)} has strides {x.stride()}, expected the last dense")
        frame, positions, table, rotary = None, None, None, 0
        if placed is not None:
            rotary = placed.cos_sin.shape[1]
            frame = native_frame(placed.frame, rotary).address
            positions, table = placed.positions.data_ptr(), placed.cos_sin.data_ptr()
        self.library.pass_handle(QUANTISED_COST * (k.numel() + v.numel())).dstgi_kv_write(
            native_pages(pages).address, k.data_ptr(), v.data_ptr(), slots.data_ptr(), slots.shape[0], k.stride(0),
            k.stride(1), v.stride(0), v.stride(1), self.num_threads, frame, positions, table, rotary,
        )  # fmt: skip
