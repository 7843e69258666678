"""What torch's operators do with low-bit pages can be recorded in a CUDA graph.

A graph records neither a copy of numbers from ordinary memory of the host nor a number that the host asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepseek_tgi.kernels.int4_format import dequantise_int4, quantise_int4
from deepseek_tgi.kernels.latent_format import dequantise_latent, error_bound, quantise_latent

UNRECORDABLE = {torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default}
"""What `torch.tensor` of numbers does, and `bool` or `item` of a tensor."""


class Watched(TorchDispatchMode):
    """Keeps what is called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        self.called.add(func)
        return func(*args, **(kwargs or {}))


def latents(mode: str, group: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        error_bound(x, mode, group)
        return dequantise_latent(*quantise_latent(x, mode, group), mode)

    return there_and_back


def heads(x: torch.Tensor) -> torch.Tensor:
    return dequantise_int4(*quantise_int4(x))


WORK = {
    "latents-int8": latents("int8", 128),
    "latents-fp8": latents("fp8_e4m3fn", 128),
    "latents-int4": latents("int4", 32),
    "heads-int4": heads,
}


@pytest.mark.parametrize("name", WORK)
def test_nothing_comes_from_or_goes_to_the_host(name: str) -> None:
    x = torch.randn(3, 128)
    first = WORK[name](x)  # a step is run once before it is recorded
    with Watched() as watched:
        again = WORK[name](x)
    assert torch.equal(first, again)
    assert watched.called
    assert not watched.called & UNRECORDABLE


def test_what_cannot_be_recorded_is_seen() -> None:
    with Watched() as watched:
        bool(torch.tensor([1.0]).any())
    assert watched.called >= UNRECORDABLE
