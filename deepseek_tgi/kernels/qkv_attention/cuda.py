"""The fused call in CUDA C++: one launch for few requests, else one up to the write into pages, then attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS, describe, named, refuse
from deepseek_tgi.kernels.cuda.heads import STORED_MODES, HeadWriter, Norms, Turns
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.frame import Frame, PlacedFrame, check_frame
from deepseek_tgi.kernels.paged_attention.cuda import NewHeads, PagedAttentionOp
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.qkv_attention import HeadNorms, QkvAttention
from deepseek_tgi.kernels.qkv_attention.composed import ComposedQkvAttention
from deepseek_tgi.kernels.seen import Seen
from deepseek_tgi.kernels.select import KernelSet

if TYPE_CHECKING:
    from deepseek_tgi.kernels.paged_attention import PagedAttention


def provide(kernels: KernelSet) -> KernelSet:
    """Comes after the ops it is made of."""
    others = ComposedQkvAttention(kernels.rms_norm, kernels.rope, kernels.kv_write, kernels.paged_attention)
    writer = HeadWriter(machine_of(kernels.device).programs)
    return replace(kernels, qkv_attention=QkvAttentionOp(writer, kernels.paged_attention, others))


class QkvAttentionOp:
    """The op; formats that the writer does not know go to `others`, who say so."""

    def __init__(self, writer: HeadWriter, attention: PagedAttention, others: QkvAttention) -> None:
        self._writer = writer
        self._attention = attention
        self._others = others
        self._checked: Seen[bool] = Seen()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        *,
        cos_sin: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        head_norms: HeadNorms | None = None,
        frame: Frame | None = None,
    ) -> torch.Tensor:
        """See the contract."""
        if pages.mode not in STORED_MODES:
            return self._others(
                q, k, v, pages, inputs, cos_sin=cos_sin, scale=scale, out=out, head_norms=head_norms, frame=frame
            )
        operands = q, k, v, cos_sin, inputs.positions, inputs.slots
        if self._checked.of(operands, pages.kept(_shape)) is None:
            _check((q, k, v, cos_sin), pages, inputs)
            self._checked.note(True, operands, pages.kept(_shape))
        placed = None if frame is None else PlacedFrame(frame, inputs.positions, cos_sin)
        if placed is not None:
            check_frame("qkv_attention", pages, placed)
        norms = None if head_norms is None else Norms(head_norms.q, head_norms.k, head_norms.eps)
        attention = self._attention
        if isinstance(attention, PagedAttentionOp) and attention.takes_heads(q, pages, inputs, out, placed):
            scales = (None, None) if frame is None else (frame.k_scale, frame.v_scale)
            new = NewHeads(k, v, cos_sin, norms, *scales)
            attention.attend_heads(q, new, pages, inputs, scale=scale, out=out, placed=placed)
            return out
        turns = Turns(inputs.positions, cos_sin, rotates=True)
        self._writer(q, k, v, pages, inputs.slots, turns=turns, norms=norms, frame=frame)
        return self._attention(q, pages, inputs, scale, out, placed=placed)


def _shape(pages: LayerPages) -> tuple[int, int, int]:
    """What of pages operands must go with."""
    return pages.num_heads, pages.k_dim, pages.v_dim


def _check(operands: tuple[torch.Tensor, ...], pages: LayerPages, inputs: ForwardInputs) -> None:
    """Raise `GenerationError` for operands that do not fit; attention checks the rest."""
    q, k, v, cos_sin = operands
    tokens = q.shape[0]
    shapes = {
        "q": (q, (tokens, q.shape[1], pages.k_dim)),
        "k": (k, (tokens, pages.num_heads, pages.k_dim)),
        "v": (v, (tokens, pages.num_heads, pages.v_dim)),
    }
    for name, (x, shape) in shapes.items():
        dense = x.stride(2) == 1 and x.stride(1) == shape[2]
        if x.dtype not in ACTIVATIONS or x.dtype != q.dtype or tuple(x.shape) != shape or not dense:
            refuse(f"qkv_attention: got {describe(name, x)}, expected {list(shape)} {named(ACTIVATIONS)}, heads dense")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or cos_sin.shape[1] > pages.k_dim:
        refuse(f"qkv_attention: got {describe('cos_sin', cos_sin)}, expected [P, at most {pages.k_dim}] float32, dense")
    for name, x, dtype in (("positions", inputs.positions, torch.int32), ("slots", inputs.slots, torch.int64)):
        if x.dtype != dtype or tuple(x.shape) != (tokens,) or not x.is_contiguous():
            refuse(f"qkv_attention: got {describe(name, x)}, expected [{tokens}] {str(dtype).removeprefix('torch.')}")
