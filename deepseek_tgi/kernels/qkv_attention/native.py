"""The fused call on the C++ library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.frame import Frame, PlacedFrame, check_frame
from deepseek_tgi.kernels.library import AttentionCall, NativeLibrary
from deepseek_tgi.kernels.native_frame import TurnTable, native_frame
from deepseek_tgi.kernels.native_pages import native_pages
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.qkv_attention import HeadNorms


@dataclass(frozen=True, slots=True)
class _Bound:
    """Operands that were checked, and the C struct made of them. Keeps the tensors alive as long as their addresses."""

    operands: tuple[torch.Tensor, ...]
    inputs: ForwardInputs
    page_shape: torch.Size
    scale: float
    struct: AttentionCall
    address: int
    function: Any


class QkvAttentionOp:
    """The op over one library. Owner of the binding of the last call; one step at a time, as a model runs."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._bound: _Bound | None = None
        self._turns = TurnTable()

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
        bound = self._bound
        if (
            bound is None
            or bound.inputs is not inputs
            or bound.page_shape != pages.k.shape  # slots were checked against another pool
            or bound.scale != scale
            or any(a is not b for a, b in zip(bound.operands, (q, k, v, out, cos_sin), strict=True))
        ):
            bound = self._bind((q, k, v, out, cos_sin), pages, inputs, scale)
            self._bound = bound
        norms: tuple[int | None, int | None, float] = (None, None, 0.0)
        if head_norms is not None:
            norms = (head_norms.q.data_ptr(), head_norms.k.data_ptr(), head_norms.eps)
        bound.function(native_pages(pages).address, bound.address, *norms, *self._framed(pages, inputs, frame, cos_sin))
        return out

    def _framed(
        self, pages: LayerPages, inputs: ForwardInputs, frame: Frame | None, cos_sin: torch.Tensor
    ) -> tuple[int | None, int | None]:
        """Addresses of the frame and of the table that its centre turns by."""
        if frame is None or not pages.quantised:
            return None, None
        if not frame.native:
            check_frame("qkv_attention", pages, PlacedFrame(frame, inputs.positions, cos_sin))
        turns = None if frame.centre is None else self._turns.address(cos_sin)
        return native_frame(frame, cos_sin.shape[1]).address, turns

    def _bind(
        self, operands: tuple[torch.Tensor, ...], pages: LayerPages, inputs: ForwardInputs, scale: float
    ) -> _Bound:
        _check(operands, pages, inputs)
        q, k, v, out, cos_sin = operands
        pointers = (
            q, k, v, out, cos_sin, inputs.positions, inputs.slots, inputs.cu_seqlens, inputs.block_tables,
            inputs.cache_lens,
        )  # fmt: skip
        struct = AttentionCall(
            *(tensor.data_ptr() for tensor in pointers), q.shape[0], inputs.cache_lens.shape[0],
            inputs.block_tables.stride(0), q.shape[1], q.stride(0), k.stride(0), v.stride(0), cos_sin.shape[1],
            self._num_threads, scale,
        )  # fmt: skip
        handle = self._library.handle(2 * q.numel() * inputs.max_context)
        return _Bound(
            operands, inputs, pages.k.shape, scale, struct, ctypes.addressof(struct), handle.dstgi_qkv_attention
        )


def _check(operands: tuple[torch.Tensor, ...], pages: LayerPages, inputs: ForwardInputs) -> None:
    """Raise `GenerationError` for operands that do not fit; once a step, so that layers need not."""
    q, k, v, out, cos_sin = operands
    tokens, kv_heads, k_dim, v_dim = q.shape[0], pages.num_heads, pages.k_dim, pages.v_dim
    shapes = {
        "q": (q, (tokens, q.shape[1], k_dim)),
        "k": (k, (tokens, kv_heads, k_dim)),
        "v": (v, (tokens, kv_heads, v_dim)),
        "out": (out, (tokens, q.shape[1], v_dim)),
    }
    for name, (x, shape) in shapes.items():
        if x.dtype != torch.float32 or tuple(x.shape) != shape or x.stride(2) != 1 or x.stride(1) != shape[2]:
            refuse(f"qkv_attention: got {describe(name, x)}, expected {list(shape)} float32 with dense heads")
    if q.shape[1] % kv_heads or not out.is_contiguous():
        refuse(f"qkv_attention: got {describe('q', q)} for {kv_heads} KV heads, {describe('out', out)}")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or cos_sin.shape[1] > k_dim:
        refuse(f"qkv_attention: got {describe('cos_sin', cos_sin)}, expected [positions, at most {k_dim}] float32")
    if cos_sin.shape[0] < inputs.max_context:
        refuse(f"qkv_attention: cos_sin has {cos_sin.shape[0]} positions, the step reaches {inputs.max_context}")
    _check_inputs(pages, inputs, tokens)


def _check_inputs(pages: LayerPages, inputs: ForwardInputs, tokens: int) -> None:
    for name in ("positions", "cu_seqlens", "block_tables", "cache_lens"):
        tensor: torch.Tensor = getattr(inputs, name)
        if tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
            refuse(f"qkv_attention: got {describe(name, tensor)}, expected dense int32")
    if inputs.slots.dtype != torch.int64 or inputs.slots.shape != (tokens,) or inputs.positions.shape != (tokens,):
        refuse(f"qkv_attention: got {describe('slots', inputs.slots)}, expected [{tokens}] int64")
    highest = int(inputs.slots.max()) if tokens else -1
    if highest >= pages.num_slots:
        refuse(f"qkv_attention: got slot {highest}, expected below {pages.num_slots}")
    needed = -(-inputs.max_context // pages.block_size)
    if tokens and inputs.block_tables.shape[1] < needed:
        refuse(
            f"qkv_attention: got {describe('block_tables', inputs.block_tables)}, expected {needed} columns or more "
            f"for a context of {inputs.max_context}"
        )
