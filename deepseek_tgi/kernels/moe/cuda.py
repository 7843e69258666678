"""Grouped experts on an NVIDIA GPU: pairs sorted by expert on the device, no word to the host.

INT4 experts of one group size run on the tensor cores straight from their codes, the shared expert cut into pieces as
wide as a routed one, so that it is part of the same launches: one token by itself (`sources/moe_one.cu`), a few by one
stream of weights (`sources/moe_few.cu`), more of them sorted by expert, by warps that take codes as they are
(`sources/moe.cu`) or, if many, by warpgroups whose weights are rounded to bfloat16 once (`sources/moe_panel.cu`).
Experts of other kinds are kept in bfloat16 and go through torch's grouped product.

A row's bits depend on how many rows there are (one, a few, many), not on what is in them.

Choice: weights of all experts lie in one tensor, tiles of 16 outputs by 64 inputs. Prevents: a pointer table, and a
launch for each expert. Rejected: sorting on the host, which would wait for the device once a layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.cuda.machine import Machine, machine_of
from deepseek_tgi.kernels.moe import PackedExperts, check_moe
from deepseek_tgi.kernels.moe import cuda_experts as packed
from deepseek_tgi.kernels.moe.cuda_experts import CudaExperts
from deepseek_tgi.kernels.moe.layer import LayerKernels, Sorted, Step
from deepseek_tgi.kernels.moe.shape import LayerShape, StreamWay
from deepseek_tgi.kernels.moe.tiles import hold_int4

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    op = CudaMoe(machine_of(kernels.device))
    return replace(kernels, hold_int4=hold_int4, pack_experts=CudaExperts, moe=op)


class CudaMoe:
    """The op over the kernels of one device."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._kernels: dict[LayerShape, LayerKernels] = {}

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: PackedExperts,
        out: torch.Tensor,
        *,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """See the contract."""
        check_moe(x, ids, weights, experts, out, dtypes=ACTIVATIONS)
        assert isinstance(experts, CudaExperts), "packed by another set of kernels"
        step = Step(x if x.dtype is torch.bfloat16 else x.bfloat16(), ids, weights, out)
        tokens = x.shape[0]
        if not tokens:
            return
        if experts.dense is not None:
            for first in range(0, tokens, packed.MOST_TOKENS):
                _grouped(step.rows(slice(first, first + packed.MOST_TOKENS)), experts.num_experts, experts.dense)
            return
        most = min(tokens, packed.MOST_TOKENS)
        if scratch is None:
            scratch = torch.empty(experts.scratch_floats(most, ids.shape[1]), device=x.device)
        if most == tokens:
            self._tiled(step, experts, scratch)
            return
        for first in range(0, tokens, most):
            self._tiled(step.rows(slice(first, first + most)), experts, scratch)

    def _tiled(self, step: Step, experts: CudaExperts, scratch: torch.Tensor) -> None:
        assert experts.gate_up is not None
        assert experts.down is not None
        tokens, top_k = step.ids.shape
        kernels: LayerKernels | None = experts.kernels.get(top_k)
        if kernels is None or kernels.machine is not self._machine:
            kernels = experts.kernels[top_k] = self._of_layer(experts, top_k)
        cuts, way = kernels.plan(experts, tokens)
        parts = cuts.cut(scratch)
        if isinstance(way, Sorted):
            kernels.run_many(step, experts.gate_up, experts.down, parts, way)
        elif isinstance(way, StreamWay):
            kernels.run_stream(step, experts.gate_up, experts.down, parts, way)
        else:
            kernels.run_one(step, experts.gate_up, experts.down, parts.gated, way)

    def _of_layer(self, experts: CudaExperts, top_k: int) -> LayerKernels:
        assert experts.gate_up is not None
        shape = LayerShape(
            group=experts.gate_up.group_size,
            bfloat16_scales=experts.gate_up.scale_dtype is torch.bfloat16,
            experts=experts.num_experts,
            top_k=top_k,
            pieces=experts.pieces,
            hidden=experts.hidden_size,
            inner=experts.inner,
        )
        found = self._kernels.get(shape)
        if found is None:
            found = self._kernels[shape] = LayerKernels(self._machine, shape)
        return found


def _grouped(step: Step, num_experts: int, dense: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Through bfloat16 weights and torch's grouped product; nothing is asked of the device."""
    gate_up, down = dense
    tokens, top_k = step.ids.shape
    device, slots = step.x.device, top_k + len(gate_up) - num_experts
    pieces = torch.arange(num_experts, len(gate_up), device=device)
    chosen = torch.cat((step.ids, pieces.expand(tokens, -1)), 1).flatten()
    shares = torch.cat((step.weights, step.weights.new_ones(tokens, len(pieces))), 1)
    order = chosen.sort(stable=True).indices
    ends = torch.zeros(len(gate_up), dtype=torch.int32, device=device)
    ends.scatter_add_(0, chosen.long(), torch.ones_like(chosen, dtype=torch.int32))
    ends = ends.cumsum(0, dtype=torch.int32)
    given = step.x.index_select(0, order // slots)
    gate, up = torch._grouped_mm(given, gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
    gated = (torch.nn.functional.silu(gate.float()) * up).bfloat16()
    products = torch.empty((len(order), step.x.shape[1]), dtype=torch.bfloat16, device=device)
    products[order] = torch._grouped_mm(gated, down.transpose(1, 2), offs=ends)
    # Ascending experts first, the shared pieces last: the order that the contract sums in.
    ranks = torch.cat((step.ids.argsort(1), torch.arange(top_k, slots, device=device).expand(tokens, -1)), 1)
    own = products.view(tokens, slots, -1)
    for slot in range(slots):
        at = ranks[:, slot : slot + 1]
        step.out.add_(own.take_along_dim(at.unsqueeze(2), 1).squeeze(1) * shares.gather(1, at))
