"""Rotary position embedding, rotate-half (NeoX) convention, in place on queries and keys.

`rope(q [T, H, D], k [T, G, D], positions [T] int32, cos_sin [P, R] f32) -> None`, q and k activations; computed in f32.
Row `p` of `cos_sin` is the R/2 cosines then the R/2 sines of position `p`, attention scaling already multiplied in; the
first `R <= D` elements of a head are rotated, element `i` with element `i + R/2`. q and k may be strided views of one
buffer with dense heads. Source: Su et al. 2021, in the half-split form of the Llama and Qwen2 checkpoints.
"""

from __future__ import annotations

from typing import Protocol

import torch

from deepseek_tgi.kernels.common import FLOAT32, Dtypes, describe, named, refuse

__all__ = ["Rope", "check_rope"]


class Rope(Protocol):
    """See the module's docstring."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None: ...


def check_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, dtypes: Dtypes = FLOAT32
) -> None:
    """Raise `GenerationError` for operands that do not fit. The values of `positions` are the caller's promise."""
    for name, x in (("q", q), ("k", k)):
        if not (x.dim() == 3 and x.dtype in dtypes and x.stride(2) == 1 and x.stride(1) == x.shape[2]):
            refuse(
                f"rope: got {describe(name, x)} with strides {x.stride()}, "
                f"expected [T, heads, D] {named(dtypes)} with dense heads"
            )
    if not (positions.dtype == torch.int32 and tuple(positions.shape) == (q.shape[0],) and k.shape[0] == q.shape[0]):
        refuse(f"rope: got {describe('positions', positions)}, expected [{q.shape[0]}] int32")
    if not (
        cos_sin.dtype == torch.float32
        and cos_sin.dim() == 2
        and cos_sin.is_contiguous()
        and cos_sin.shape[1] % 2 == 0
        and cos_sin.shape[1] <= min(q.shape[2], k.shape[2])
    ):
        refuse(
            f"rope: got {describe('cos_sin', cos_sin)}, "
            f"expected [positions, R] float32, R even and at most {q.shape[2]}"
        )
