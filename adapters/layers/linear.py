"""One matrix product of a layer, whatever its stored format; several modules may be fused along their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepseek_tgi.kernels.common import PackedDense, PackedInt4

Kernel = Callable[[torch.Tensor, Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""`kernel(x, weight, bias, residual, out)`."""


class Linear(Protocol):
    """`out = x W^T + bias (+ residual)`; `out` and `residual` may be the same tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """Shapes: `x [T, K]`, `residual`/`out [T, N]`, all float32 and dense."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the form its kernel wants."""

    kernel: Kernel
    weight: PackedInt4 | PackedDense
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.numel() * 4)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return self.kernel(x, self.weight, self.bias, residual, out)


@dataclass(frozen=True, slots=True)
class SplitLinear:
    """Modules that should be fused but are stored differently (one dense, one packed): run one by one.

    Takes one temporary a module; only checkpoints that mix formats within a layer pay it.
    """

    parts: Sequence[PackedLinear]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        at = 0
        for part in self.parts:
            end = at + part.weight.out_features
            own = x.new_empty(x.shape[0], part.weight.out_features)
            part(x, None, own)
            if residual is not None:
                own += residual[:, at:end]
            out[:, at:end] = own
            at = end
        return out
