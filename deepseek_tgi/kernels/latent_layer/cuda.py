"""A decode step's latent layer: what comes before attention is one launch, as `cuda/sources/latent_ready.cu` says.

Other steps take the parts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.program import KernelSpec, spec
from deepseek_tgi.kernels.latent_attention import PackedUp, check_latent_attention
from deepseek_tgi.kernels.latent_attention.cuda import (
    SEVERAL,
    CudaLatentAttention,
    CudaUp,
    takes_products,
    unfit_heads,
)
from deepseek_tgi.kernels.latent_attention.decode import (
    COLUMNS,
    GROUPS,
    MODES,
    PRODUCT_THREADS,
    RANK,
    ROPE,
    page_bytes,
    unfit,
)
from deepseek_tgi.kernels.latent_prepare.cuda import CudaLatentPrepare, check_prepare, fits
from deepseek_tgi.kernels.pages import LatentPages

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)

_SIGNATURE = "pllplpi" + "plpl" + "pf" + "ppp" + "pppl"


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`; comes after the parts."""
    prepare, attend = kernels.latent_prepare, kernels.latent_attention
    if not (isinstance(prepare, CudaLatentPrepare) and isinstance(attend, CudaLatentAttention)):
        return kernels
    return replace(kernels, latent_layer=CudaLatentLayer(prepare, attend))


def ready_spec(mode: str, block_size: int, nope_dim: int) -> KernelSpec:
    """The kernel for pages of a mode."""
    return spec(
        "latent_ready", "latent_ready", _SIGNATURE, 2 * COLUMNS * nope_dim, MODE=MODES[mode], RANK=RANK, ROPE=ROPE,
        GROUP=GROUPS.get(mode, RANK), BLOCK=block_size, X_BF16=1, NOPE=nope_dim,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CudaLatentLayer:
    """See the module's docstring."""

    prepare: CudaLatentPrepare
    attend: CudaLatentAttention
    _said: set[str] = field(default_factory=set)

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        pages: LatentPages,
        inputs: ForwardInputs,
        *,
        up: PackedUp,
        norm_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        form: str = "auto",
    ) -> torch.Tensor:
        """See the contract."""
        assert isinstance(up, CudaUp), "packed by another set of kernels"
        few = inputs.max_seqlen == 1 and 0 < q.shape[0] <= SEVERAL
        if not (few and self._takes(q, pages, up, out) and fits(q, latent, rope, pages, cos_sin)):
            self.prepare(q, latent, rope, pages, inputs, norm_weight=norm_weight, eps=eps, cos_sin=cos_sin)
            return self.attend(q, pages, up, inputs, scale=scale, out=out, form=form)
        check_prepare(q, latent, rope, pages, inputs, norm_weight=norm_weight, cos_sin=cos_sin)
        check_latent_attention(q, pages, up, inputs, out=out, form=form, dtypes=ACTIVATIONS)
        up.turn_for(pages)
        batch, heads, _ = q.shape
        queries = torch.empty(heads, batch, RANK, dtype=torch.bfloat16, device=q.device)
        self.attend.decode.programs.kernel(ready_spec(pages.mode, pages.block_size, up.nope_dim))(
            (RANK // COLUMNS + 2, heads, 1), PRODUCT_THREADS,
            (
                q, q.stride(1), q.stride(0), up.rows, up.rows.stride(0), queries, batch, latent, latent.stride(0), rope,
                rope.stride(0), norm_weight, eps, inputs.positions, cos_sin, inputs.slots, pages.latent, pages.rope,
                pages.scale, page_bytes(pages),
            ), overlap=True,
        )  # fmt: skip
        rotary, step = q.transpose(0, 1)[..., :ROPE], (inputs.block_tables, inputs.cache_lens)
        self.attend.from_queries(queries, rotary, pages, up, step, scale=scale, out=out)
        return out

    def _takes(self, q: torch.Tensor, pages: LatentPages, up: CudaUp, out: torch.Tensor) -> bool:
        """Whether the one launch is for such a layer; of one that it is never for the reason is told once."""
        reason = unfit(pages) or unfit_heads(up)
        if reason is None:
            narrow = q.dtype is torch.bfloat16 and out.dtype is torch.bfloat16
            return narrow and takes_products(q.transpose(0, 1)[..., ROPE:], up, out)
        if reason not in self._said:
            self._said.add(reason)
            logger.info("latent_layer: no single launch before attention for %s; it is several", reason)
        return False
