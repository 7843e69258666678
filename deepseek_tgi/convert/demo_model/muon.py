"""Muon for stacks of matrices: momentum whose singular values are brought near one.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), the quintic iteration; the
step's scale from J. Liu et al., "Muon is scalable for LLM training" (2025), so that Adam's learning rates fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """`matrices [..., N, K]` with singular values of about one, in bfloat16 on the way."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon:
    """Steps parameters whose last two sides are a matrix; those of one shape are worked on together."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        self._momentum, self._decay = momentum, decay
        self._groups: dict[tuple[int, ...], list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self._groups[tuple(parameter.shape[-2:])].append(parameter)
        self._averages = {
            sides: torch.zeros(sum(p.numel() // (sides[0] * sides[1]) for p in group), *sides, device=group[0].device)
            for sides, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at learning rate `rate` from the gradients at hand."""
        for sides, group in self._groups.items():
            gradient = torch.cat([p.grad.reshape(-1, *sides) for p in group if p.grad is not None])
            average = self._averages[sides]
            average.lerp_(gradient, 1 - self._momentum)
            update = orthogonalise(gradient.lerp(average, self._momentum)) * (0.2 * max(sides) ** 0.5)
            pieces = update.split([p.numel() // (sides[0] * sides[1]) for p in group])
            matrices: list[torch.Tensor] = list(group)
            torch._foreach_mul_(matrices, 1 - rate * self._decay)
            torch._foreach_add_(
                matrices, [piece.view_as(p) for piece, p in zip(pieces, group, strict=True)], alpha=-rate
            )
