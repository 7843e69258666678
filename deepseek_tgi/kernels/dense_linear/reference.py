"""Dense linear, spelled out: one output feature at a time in float32."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import PackedDense, PlainDense, PlainFp8, check_dense, check_linear, finish_linear


class ReferenceDense(PlainDense):
    """A copy in the checkpoint's own dtype."""

    __slots__ = ()


class ReferenceFp8(PlainFp8):
    """A copy as stored."""

    __slots__ = ()


def pack_dense(weight: torch.Tensor, *, exact: bool = False) -> PackedDense:
    """Check and copy."""
    check_dense(weight)
    return ReferenceDense(weight.clone())


def dense_linear(
    x: torch.Tensor,
    w: PackedDense,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[m, n] = sum over k of x[m, k] * w[n, k]`."""
    assert isinstance(w, (ReferenceDense, ReferenceFp8))
    check_linear(x, w, bias, residual, out)
    y = torch.empty((x.shape[0], w.out_features))
    for n in range(w.out_features):
        y[:, n] = (x * w.rows(torch.tensor([n]))).sum(1)
    return finish_linear(y, bias, residual, out)
