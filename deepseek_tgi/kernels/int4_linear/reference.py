"""INT4 linear, spelled out: one output feature at a time, group by group, in float32."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import Int4Tensors, PackedInt4, check_int4, check_linear, finish_linear


class ReferenceInt4(PackedInt4):
    """The checkpoint's tensors, untouched."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Int4Tensors) -> None:
        parts = (tensors.codes, tensors.zeros, tensors.scales)
        out_features, in_features = tensors.codes.shape
        super().__init__(out_features, in_features, tensors.group_size, sum(p.nbytes for p in parts))
        self.tensors = tensors

    def dequantise(self) -> torch.Tensor:
        """The weight as `[N, K] float32`."""
        t = self.tensors
        zeros = t.zeros.float().repeat_interleave(t.group_size, 1)
        return (t.codes.float() - zeros) * t.scales.float().repeat_interleave(t.group_size, 1)


def pack_int4(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedInt4:
    """Check and copy."""
    t = check_int4(codes, zeros, scales, group_size)
    return ReferenceInt4(Int4Tensors(t.codes.clone(), t.zeros.clone(), t.scales.clone(), t.group_size))


def int4_linear(
    x: torch.Tensor,
    w: PackedInt4,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[m, n] = sum over groups of scale * sum of x * (code - zero)`."""
    assert isinstance(w, ReferenceInt4)
    check_linear(x, w, bias, residual, out)
    t = w.tensors
    y = torch.zeros((x.shape[0], w.out_features))
    for n in range(w.out_features):
        for g in range(w.in_features // w.group_size):
            span = slice(g * w.group_size, (g + 1) * w.group_size)
            difference = t.codes[n, span].float() - t.zeros[n, g].float()
            y[:, n] += (x[:, span] * difference).sum(1) * t.scales[n, g].float()
    return finish_linear(y, bias, residual, out)
