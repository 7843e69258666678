"""Norm, rotation and storing of latents as one launch, and storing alone, as `cuda/sources/latent_prepare.cu` says.

Against the parts one after the other, sums of squares are added in another order: the last bit of a norm may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS, describe, refuse
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec, Programs, spec
from deepseek_tgi.kernels.latent_attention.decode import GROUPS, MODES, RANK, page_bytes
from deepseek_tgi.kernels.latent_prepare import LatentPrepare
from deepseek_tgi.kernels.latent_prepare.composed import ComposedLatentPrepare
from deepseek_tgi.kernels.latent_write import check_latent_write
from deepseek_tgi.kernels.latent_write.plain import latent_write
from deepseek_tgi.kernels.pages import LatentPages
from deepseek_tgi.kernels.rms_norm import check_rms_norm
from deepseek_tgi.kernels.rope import check_rope
from deepseek_tgi.kernels.seen import Seen

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

_SIGNATURE = "plii" + "plpl" + "pf" + "ppp" + "pppl"
_MOST_THREADS = 544


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`."""
    write = CudaLatentWrite(machine_of(kernels.device).programs)
    prepare = CudaLatentPrepare(write, ComposedLatentPrepare(kernels.rms_norm, kernels.rope, write))
    return replace(kernels, latent_write=write, latent_prepare=prepare)


def writes(pages: LatentPages) -> bool:
    """Whether the kernel knows these pages; others are written by torch's operators."""
    if pages.mode not in MODES or pages.rank != RANK or pages.rope_dim % 2:
        return False
    return pages.scale is None or pages.group == GROUPS[pages.mode]


@dataclass(frozen=True, slots=True)
class CudaLatentWrite:
    """Stores latents and rotary keys as they come."""

    programs: Programs
    _kernels: dict[object, Kernel] = field(default_factory=dict)

    def __call__(self, pages: LatentPages, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
        """See the contract."""
        check_latent_write(pages, latent, rope, slots, dtypes=ACTIVATIONS)
        if not writes(pages) or latent.dtype != rope.dtype or not (dense(latent) and dense(rope)):
            latent_write(pages, latent, rope, slots)
            return
        self.launch(None, latent, rope, pages, slots)

    def launch(
        self,
        q: torch.Tensor | None,
        latent: torch.Tensor,
        rope: torch.Tensor,
        pages: LatentPages,
        slots: torch.Tensor,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        turn: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Start the kernel; `norm` is weight and eps, `turn` positions and table, both of them or neither."""
        if latent.shape[0] == 0:
            return
        weight, eps = norm or (None, 0.0)
        positions, table = turn or (None, None)
        row, heads, width = (0, 0, 0) if q is None else (q.stride(0), q.shape[1], q.shape[2])
        key = pages.kept(_shape), latent.dtype, heads, norm is not None
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self.programs.kernel(_spec(pages, latent.dtype, heads, norm is not None))
        found(
            (latent.shape[0], 1, 1), _threads(heads, pages.rope_dim),
            (
                q, row, heads, width, latent, latent.stride(0), rope, rope.stride(0), weight, eps, positions, table,
                slots, pages.latent, pages.rope, pages.scale, pages.kept(page_bytes),
            ), overlap=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CudaLatentPrepare:
    """The op as one launch; `apart` does what the kernel does not know."""

    write: CudaLatentWrite
    apart: LatentPrepare
    _checked: Seen[bool] = field(default_factory=Seen)
    """Whether the kernel knows the operands."""

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
        operands = q, latent, rope, inputs.positions, inputs.slots, cos_sin
        like = pages.kept(_shape), norm_weight.shape, norm_weight.dtype, norm_weight.stride()
        known = self._checked.of(operands, like)
        if known is None:
            known = fits(q, latent, rope, pages, cos_sin)
            if known:
                check_prepare(q, latent, rope, pages, inputs, norm_weight=norm_weight, cos_sin=cos_sin)
            self._checked.note(known, operands, like)
        if not known:
            self.apart(q, latent, rope, pages, inputs, norm_weight=norm_weight, eps=eps, cos_sin=cos_sin)
            return
        self.write.launch(
            q, latent, rope, pages, inputs.slots, norm=(norm_weight, eps), turn=(inputs.positions, cos_sin)
        )


def fits(q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, pages: LatentPages, cos_sin: torch.Tensor) -> bool:
    """Whether the kernel knows such operands."""
    known = writes(pages) and cos_sin.shape[1] == pages.rope_dim and q.dtype == latent.dtype == rope.dtype
    return known and dense(latent) and dense(rope)


def check_prepare(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    pages: LatentPages,
    inputs: ForwardInputs,
    *,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    """Raise `GenerationError` for operands that do not go together."""
    check_rms_norm(latent, norm_weight, latent, dtypes=ACTIVATIONS)
    check_rope(q, rope.unsqueeze(1), inputs.positions, cos_sin, dtypes=ACTIVATIONS)
    check_latent_write(pages, latent, rope, inputs.slots, dtypes=ACTIVATIONS)
    if not norm_weight.is_contiguous():
        refuse(f"latent_prepare: {describe('norm_weight', norm_weight)} is to be contiguous")


def dense(x: torch.Tensor) -> bool:
    """Whether the elements of a row lie side by side."""
    return x.stride(-1) == 1


def _threads(heads: int, rope_dim: int) -> int:
    """A pair each of the queries' elements."""
    return min(32 + -(-heads * rope_dim // 64) * 32, _MOST_THREADS)


def _shape(pages: LatentPages) -> tuple[str, int, int, int, int, int]:
    """What of pages decides which kernel there is, and whether operands go with them."""
    return pages.mode, pages.rank, pages.rope_dim, pages.group, pages.block_size, pages.num_slots


def _spec(pages: LatentPages, dtype: torch.dtype, heads: int, norm: bool) -> KernelSpec:
    return spec(
        "latent_prepare", "latent_prepare", _SIGNATURE, MODE=MODES[pages.mode], RANK=RANK, ROPE=pages.rope_dim,
        GROUP=GROUPS.get(pages.mode, RANK), BLOCK=pages.block_size, NORM=int(norm),
        X_BF16=int(dtype == torch.bfloat16), THREADS=_threads(heads, pages.rope_dim),
    )  # fmt: skip
