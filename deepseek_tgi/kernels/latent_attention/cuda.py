"""Latent attention on a GPU: which form each request takes, and the products around the kernel in latent space.

A step of single tokens is absorbed as a whole and asks the device for nothing, so CUDA graphs can hold it. Elsewhere a
request's form is chosen by its token counts, as the contract says: absorbed, every token is a row of its own for the
decode kernel; expanded, `expanded` makes keys and values for the request. Queries, latents and weights are bfloat16,
sums float32.

INT4 pages are read without turning their groups back: the up-projection's rows are turned once instead, when it first
meets such pages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ACTIVATIONS, ComputeDtype
from deepseek_tgi.kernels.compiler import BuildError
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.latent_attention import PackedUp, check_latent_attention
from deepseek_tgi.kernels.latent_attention.decode import VALUES, WIDE_FROM, LatentDecode, unfit
from deepseek_tgi.kernels.latent_attention.expanded import ExpandedAttention
from deepseek_tgi.kernels.latent_attention.plain import attend
from deepseek_tgi.kernels.latent_attention.requests import Single, Whole, split
from deepseek_tgi.kernels.latent_format import hadamard, signs
from deepseek_tgi.kernels.pages import LatentPages
from deepseek_tgi.kernels.seen import Seen
from deepseek_tgi.kernels.triton_use import triton_unfit

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)

SEVERAL = 64
"""Rows up to which the products around the kernel are kernels of our own: they begin before the launch ahead ends."""


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`."""
    if kernels.compute_dtype is ComputeDtype.FLOAT32:
        raise BuildError("latent attention on a GPU is of bfloat16 queries, and float32 compute was asked for")
    machine = machine_of(kernels.device)
    decode = LatentDecode(machine.programs, machine.multiprocessors, machine.capability)
    unfit = triton_unfit()
    if unfit is not None:
        logger.warning("latent_attention: %s; torch's attention does prompts, which is slower", unfit)
    expanded = ExpandedAttention(machine.programs, machine.capability, tiled=unfit is None)
    op = CudaLatentAttention(decode, expanded)
    return replace(kernels, pack_up=CudaUp, latent_attention=op)


class CudaUp(PackedUp):
    """`rows [H, Dn + Dv, R]` bfloat16; `group` is that of the INT4 pages they are turned for, else 0."""

    __slots__ = ("group", "rows")

    def __init__(self, weight: torch.Tensor, num_heads: int, nope_dim: int) -> None:
        self.rows = weight.to(torch.bfloat16, copy=True).view(num_heads, -1, weight.shape[1])
        self.group = 0
        super().__init__(num_heads, nope_dim, self.rows.shape[1] - nope_dim, weight.shape[1], self.rows.nbytes)

    @property
    def keys(self) -> torch.Tensor:
        """`[H, Dn, R]`."""
        return self.rows[:, : self.nope_dim]

    @property
    def values(self) -> torch.Tensor:
        """`[H, Dv, R]`."""
        return self.rows[:, self.nope_dim :]

    def turn_for(self, pages: LatentPages) -> None:
        """Bring the rows into the space of what `pages` hold; in place, since graphs may know where they lie.

        `x = D H y`, so a row u meets y as `H D u`; and back, `u = D H (H D u) / g`.
        """
        group = pages.group if pages.mode == "int4" else 0
        if group == self.group:
            return
        if self.group:
            parts = self.rows.float().view(*self.rows.shape[:2], -1, self.group)
            back = hadamard(parts) * signs(self.group, self.rows.device) / self.group
            self.rows.copy_(back.flatten(-2))
        if group:
            parts = self.rows.float().view(*self.rows.shape[:2], -1, group)
            self.rows.copy_(hadamard(parts * signs(group, self.rows.device)).flatten(-2))
        self.group = group


@dataclass(frozen=True, slots=True)
class CudaLatentAttention:
    """The op over the kernels of one device."""

    decode: LatentDecode
    expanded: ExpandedAttention
    _checked: Seen[bool] = field(default_factory=Seen)
    _parts: Seen[tuple[Sequence[Whole], Sequence[Single]]] = field(default_factory=Seen)
    _said: set[str] = field(default_factory=set)

    def __call__(
        self,
        q: torch.Tensor,
        pages: LatentPages,
        up: PackedUp,
        inputs: ForwardInputs,
        *,
        scale: float,
        out: torch.Tensor,
        form: str = "auto",
    ) -> torch.Tensor:
        """See the contract."""
        operands = q, out, inputs.cu_seqlens, inputs.cache_lens, inputs.block_tables
        like = form, inputs.max_context, up.rank, up.num_heads, up.nope_dim, up.v_dim, pages.kept(_shape)
        if self._checked.of(operands, like) is None:
            check_latent_attention(q, pages, up, inputs, out=out, form=form, dtypes=ACTIVATIONS)
            self._checked.note(True, operands, like)
        assert isinstance(up, CudaUp), "packed by another set of kernels"
        up.turn_for(pages)
        given = q if q.dtype is torch.bfloat16 else q.to(torch.bfloat16)
        made = out if out.dtype == torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
        if inputs.max_seqlen == 1:
            step = inputs.block_tables, inputs.cache_lens
            few = q.shape[0] <= SEVERAL
            self._absorbed(given, pages, up, step, scale=scale, out=made, capacity=inputs.max_context, few=few)
        elif q.shape[0]:
            self._by_request(given, pages, up, inputs, scale=scale, out=made, form=form)
        if made is not out:
            out.copy_(made)
        return out

    def from_queries(
        self,
        queries: torch.Tensor,
        rotary: torch.Tensor,
        pages: LatentPages,
        up: CudaUp,
        step: tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """The rest of a decode step, whose `queries [H, B, R]` are in latent space already."""
        if len(out) == 1 and out.shape[1] < WIDE_FROM:  # values follow where parts are put together; one launch less
            self.decode(queries, rotary, pages, step, scale, values=(up.values, out))
        else:
            self.decode.values(self.decode(queries, rotary, pages, step, scale), up.rows, out)

    def _by_request(
        self,
        q: torch.Tensor,
        pages: LatentPages,
        up: CudaUp,
        inputs: ForwardInputs,
        *,
        scale: float,
        out: torch.Tensor,
        form: str,
    ) -> None:
        operands = inputs.cu_seqlens, inputs.cache_lens, inputs.block_tables
        like = form, up.rank, up.nope_dim, up.v_dim, pages.rope_dim, *(operand._version for operand in operands)
        parts = self._parts.of(operands, like)
        if parts is None:
            parts = self._parts.note(split(inputs, form, up, pages.rope_dim), operands, like)
        wholes, singles = parts
        for one in wholes:
            lone = one.rows.stop - one.rows.start == q.shape[0]
            given, made = (q, out) if lone else (q[one.rows], out[one.rows])
            self.expanded(given, pages, one.table, one.length, up, scale=scale, out=made)
        for some in singles:
            step = some.tables, some.positions
            if isinstance(some.rows, slice):
                given, made = q[some.rows], out[some.rows]
                self._absorbed(given, pages, up, step, scale=scale, out=made, capacity=inputs.max_context)
                continue
            made = torch.empty(len(some.rows), *out.shape[1:], dtype=out.dtype, device=out.device)
            self._absorbed(q[some.rows], pages, up, step, scale=scale, out=made, capacity=inputs.max_context)
            out[some.rows] = made

    def _absorbed(
        self,
        q: torch.Tensor,
        pages: LatentPages,
        up: CudaUp,
        step: tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float,
        out: torch.Tensor,
        capacity: int,
        few: bool = False,
    ) -> None:
        """Every row of `q [N, H, Dr + Dn]` one token over its own context, `step` its block table and position."""
        heads = q.transpose(0, 1)
        rotary, rest = heads[..., : pages.rope_dim], heads[..., pages.rope_dim :]
        if few and unfit(pages) is None and takes_products(rest, up, out):
            self.from_queries(self.decode.queries(rest, up.rows), rotary, pages, up, step, scale=scale, out=out)
            return
        queries = torch.bmm(rest, up.keys)
        reason = unfit(pages)
        if reason is None:
            sums = self.decode(queries, rotary, pages, step, scale)
        else:
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("latent_attention: no CUDA kernel for %s; torch does the work, which is slower", reason)
            sums = attend(queries, rotary, pages, step, scale=scale, capacity=capacity)
        torch.bmm(sums, up.values.transpose(1, 2), out=out.transpose(0, 1))


def _shape(pages: LatentPages) -> tuple[int, int, int]:
    """What of pages operands must go with."""
    return pages.rank, pages.rope_dim, pages.block_size


def unfit_heads(up: CudaUp) -> str | None:
    """Why the kernels of the products around attention do not make such heads, if so."""
    if up.nope_dim % 32 or up.v_dim % VALUES:
        return f"heads of {up.nope_dim} elements besides the rotary ones and {up.v_dim} values"
    return None


def takes_products(rest: torch.Tensor, up: CudaUp, out: torch.Tensor) -> bool:
    """Whether the kernels of the products around take `rest [H, B, Dn]` and `out [B, H, Dv]`."""
    aligned = rest.stride(2) == 1 and not (rest.stride(0) % 8 or rest.stride(1) % 8 or rest.data_ptr() % 16)
    return aligned and unfit_heads(up) is None and out.is_contiguous()
