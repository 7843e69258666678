"""The operation on the C++ library: one pass over each token's rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.latent_write import check_latent_write
from deepseek_tgi.kernels.library import QUANTISED_COST, LatentRows, NativeLibrary
from deepseek_tgi.kernels.native_latents import native_latents
from deepseek_tgi.kernels.pages import LatentPages
from deepseek_tgi.kernels.rms_norm import check_rms_norm
from deepseek_tgi.kernels.rope import check_rope


@dataclass(frozen=True, slots=True)
class _Bound:
    """Operands that were checked, and the C struct made of them. Keeps the tensors alive as long as their addresses."""

    operands: tuple[torch.Tensor, ...]
    inputs: ForwardInputs
    page_shape: torch.Size
    struct: LatentRows
    address: int


class LatentPrepareOp:
    """The op over one library. Owner of the binding of the last call; one step at a time, as a model runs.

    Layers of a step pass the same `inputs` and usually the same buffers: what was checked for one holds for the next.
    """

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._bound: _Bound | None = None

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        pages: LatentPages,
        inputs: ForwardInputs,
        *,
        norm_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
    ) -> None:
        """See the contract."""
        bound, operands = self._bound, (q, latent, rope, cos_sin)
        if (
            bound is None
            or bound.inputs is not inputs
            or bound.page_shape != pages.latent.shape  # slots were checked against another pool
            or any(a is not b for a, b in zip(bound.operands, operands, strict=True))
        ):
            bound = self._bound = self._bind(operands, pages, inputs, norm_weight)
        if norm_weight.shape[0] != pages.rank or norm_weight.dtype is not torch.float32:
            refuse(f"latent_prepare: got {describe('norm_weight', norm_weight)}, expected [{pages.rank}] float32")
        handle = self._library.pass_handle(q.numel() + QUANTISED_COST * latent.numel())
        handle.dstgi_latent_prepare(native_latents(pages).address, bound.address, norm_weight.data_ptr(), eps)

    def _bind(
        self,
        operands: tuple[torch.Tensor, ...],
        pages: LatentPages,
        inputs: ForwardInputs,
        norm_weight: torch.Tensor,
    ) -> _Bound:
        q, latent, rope, cos_sin = operands
        check_rms_norm(latent, norm_weight, latent)
        check_rope(q, rope.unsqueeze(1), inputs.positions, cos_sin)
        check_latent_write(pages, latent, rope, inputs.slots)
        if latent.stride(1) != 1 or rope.stride(1) != 1:
            refuse(f"latent_prepare: {describe('latent', latent)} or its rotary key has no dense rows")
        if cos_sin.shape[0] < inputs.max_context:
            refuse(f"latent_prepare: cos_sin has {cos_sin.shape[0]} positions, the step reaches {inputs.max_context}")
        pointers = (q, latent, rope, cos_sin, inputs.positions, inputs.slots)
        struct = LatentRows(
            *(tensor.data_ptr() for tensor in pointers), q.shape[0], q.shape[1], q.shape[2], q.stride(0),
            latent.stride(0), rope.stride(0), cos_sin.shape[1], self._num_threads,
        )  # fmt: skip
        return _Bound(operands, inputs, pages.latent.shape, struct, ctypes.addressof(struct))
