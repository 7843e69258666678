"""Paged attention on the C++ library, as `native/attention.cpp` explains."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.frame import PlacedFrame
from deepseek_tgi.kernels.library import NativeLibrary
from deepseek_tgi.kernels.native_frame import TurnTable, native_frame
from deepseek_tgi.kernels.native_pages import native_pages
from deepseek_tgi.kernels.paged_attention import check_paged_attention
from deepseek_tgi.kernels.pages import LayerPages


@dataclass(frozen=True, slots=True)
class PagedAttentionOp:
    """The op over one library."""

    library: NativeLibrary
    num_threads: int
    turns: TurnTable = field(default_factory=TurnTable)

    def __call__(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        scale: float,
        out: torch.Tensor | None = None,
        *,
        placed: PlacedFrame | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        check_paged_attention(q, pages, inputs, out, placed)
        if q.stride(2) != 1 or q.stride(1) != q.shape[2] or inputs.block_tables.stride(1) != 1:
            refuse(f"paged_attention: {describe('q', q)} has strides {q.stride()}, expected dense heads")
        rows, heads = q.shape[0], q.shape[1]
        y = torch.empty(rows, heads, pages.v_dim) if out is None else out
        call = self.library.handle(2 * q.numel() * inputs.max_context)
        frame, turns, rotary = None, None, 0
        if placed is not None and placed.frame.centre is not None:
            rotary = placed.cos_sin.shape[1]
            frame, turns = native_frame(placed.frame, rotary).address, self.turns.address(placed.cos_sin)
        call.dstgi_paged_attention(
            native_pages(pages).address, q.data_ptr(), y.data_ptr(), inputs.cu_seqlens.data_ptr(),
            inputs.block_tables.data_ptr(), inputs.cache_lens.data_ptr(), inputs.cache_lens.shape[0],
            inputs.block_tables.stride(0), heads, q.stride(0), scale, self.num_threads,
            frame, turns, rotary,
        )  # fmt: skip
        return y
