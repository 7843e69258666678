"""Latent write on the C++ library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.latent_write import check_latent_write
from deepseek_tgi.kernels.library import QUANTISED_COST, NativeLibrary
from deepseek_tgi.kernels.native_latents import native_latents
from deepseek_tgi.kernels.pages import LatentPages


@dataclass(frozen=True, slots=True)
class LatentWriteOp:
    """The op over one library."""

    library: NativeLibrary
    num_threads: int

    def __call__(self, pages: LatentPages, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
        """See the contract."""
        check_latent_write(pages, latent, rope, slots)
        for name, x in (("latent", latent), ("rope", rope)):
            if x.stride(1) != 1:
                refuse(f"latent_write: {describe(name, x)} has strides {x.stride()}, expected dense rows")
        self.library.pass_handle(QUANTISED_COST * latent.numel()).dstgi_latent_write(
            native_latents(pages).address, latent.data_ptr(), rope.data_ptr(), slots.data_ptr(), slots.shape[0],
            latent.stride(0), rope.stride(0), self.num_threads,
        )  # fmt: skip
