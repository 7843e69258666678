"""One matrix product of a layer, whatever its stored format; several modules may be fused along their outputs.

What comes before a product (a norm, the gated activation) is handed to it, since a kernel may do both in one pass; the
bits are the same either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.kernels.common import PackedDense, PackedInt4
from deepseek_tgi.kernels.select import KernelSet


class Linear(ABC):
    """`out = x W^T + bias (+ residual)`; `out` and `residual` may be the same tensor.

    Shapes: `x [T, K]`, `residual`/`out [T, N]`, all dense, except that rows may lie apart in the `x` of `after_norm`.
    `x` is of the set's activation dtype (the residual stream in `after_norm`), `residual` and `out` are the stream or
    activations. `scratch` has the shape and dtype of the product's input and is dense.
    """

    def __init__(self, kernels: KernelSet) -> None:
        self._silu_mul = kernels.silu_mul

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """The product alone."""

    def after_norm(self, x: torch.Tensor, norm: RmsNorm, scratch: torch.Tensor, out: torch.Tensor) -> None:
        """The product of `norm(x)`."""
        self(norm(x, scratch), None, out)

    def after_silu(
        self, gate_up: torch.Tensor, scratch: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """The product of `silu(gate) * up`; `gate_up [T, 2K]`."""
        self(self._silu_mul(gate_up, scratch), residual, out)


class DenseLinear(Linear):
    """A dense weight."""

    def __init__(self, kernels: KernelSet, weight: PackedDense, bias: torch.Tensor | None) -> None:
        super().__init__(kernels)
        self._kernel = kernels.dense_linear
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.weight.nbytes + _bias_bytes(self.bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return self._kernel(x, self.weight, self.bias, residual, out)


class Int4Linear(Linear):
    """An INT4 weight; norm and activation ride in the product's kernel."""

    def __init__(self, kernels: KernelSet, weight: PackedInt4, bias: torch.Tensor | None) -> None:
        super().__init__(kernels)
        self._kernel = kernels.int4_linear
        self._norm_kernel = kernels.norm_int4_linear
        self._silu_kernel = kernels.silu_int4_linear
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self.weight.nbytes + _bias_bytes(self.bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return self._kernel(x, self.weight, self.bias, residual, out)

    def after_norm(self, x: torch.Tensor, norm: RmsNorm, scratch: torch.Tensor, out: torch.Tensor) -> None:
        """See `Linear`."""
        self._norm_kernel(x, norm.weight, norm.eps, self.weight, bias=self.bias, out=out)

    def after_silu(
        self, gate_up: torch.Tensor, scratch: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """See `Linear`."""
        self._silu_kernel(gate_up, self.weight, self.bias, residual, out)


class OrderedLinear(Linear):
    """A weight whose inputs were sorted by quantisation group when it was stored: x is gathered into that order first.

    Takes one temporary of x a product; where the inputs' maker is at hand, its rows are sorted at load instead.
    """

    def __init__(self, kernels: KernelSet, sorted_linear: DenseLinear | Int4Linear, order: torch.Tensor) -> None:
        super().__init__(kernels)
        self._sorted = sorted_linear
        self._order = order

    @property
    def weight(self) -> PackedDense | PackedInt4:
        """The packed weight, inputs sorted."""
        return self._sorted.weight

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return self._sorted.nbytes + self._order.nbytes

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return self._sorted(x.index_select(1, self._order), residual, out)


class SplitLinear(Linear):
    """Modules that should be fused but are stored differently (one dense, one packed): run one by one.

    Several rows take one temporary a module, for a module's columns are not dense then; only checkpoints that mix
    formats within a layer pay it.
    """

    def __init__(self, kernels: KernelSet, parts: Sequence[DenseLinear | Int4Linear | OrderedLinear]) -> None:
        super().__init__(kernels)
        self._parts = parts

    @property
    def nbytes(self) -> int:
        """See `Linear`."""
        return sum(part.nbytes for part in self._parts)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        at = 0
        for part in self._parts:
            end = at + part.weight.out_features
            columns = out[:, at:end]
            if x.shape[0] == 1:
                part(x, None if residual is None else residual[:, at:end], columns)
            else:
                own = part(x, None, out.new_empty(columns.shape))
                columns.copy_(own if residual is None else own.add_(residual[:, at:end]))
            at = end
        return out


def _bias_bytes(bias: torch.Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes
