"""Norm, router and choice of a few tokens in one launch on Hopper, as `cuda/sources/expert_choice.cu` explains."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS, PackedDense
from deepseek_tgi.kernels.cuda.machine import Machine, machine_of
from deepseek_tgi.kernels.cuda.program import KernelSpec, spec
from deepseek_tgi.kernels.dense_linear import DenseLinear
from deepseek_tgi.kernels.dense_linear.cuda import CudaDense
from deepseek_tgi.kernels.rms_norm import RmsNorm, check_rms_norm
from deepseek_tgi.kernels.route import Route, Routing
from deepseek_tgi.kernels.route.check import check_route
from deepseek_tgi.kernels.route.cuda import routing_macros

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet

logger = logging.getLogger(__name__)

RANKS = 8
"""Blocks of a cluster, which share the router's rows."""
MOST_TOKENS = 64
_HOPPER = 90
_MOST_THREADS = 512
_MOST_HELD = 16
"""Runs of four weights that a thread holds."""
_LANES = 32
_ALONE = 16
"""Tokens up to which each has a cluster of its own."""


def provide(kernels: KernelSet) -> KernelSet:
    """See `device_set.Provider`; comes after the parts."""
    machine = machine_of(kernels.device)
    if machine.capability != _HOPPER:
        return kernels
    parts = Parts(kernels.rms_norm, kernels.dense_linear, kernels.route)
    return replace(kernels, choose_experts=CudaChooseExperts(machine, parts))


@dataclass(frozen=True, slots=True)
class Parts:
    """The ops one by one, for what the kernel does not know."""

    rms_norm: RmsNorm
    dense_linear: DenseLinear
    route: Route


@dataclass(frozen=True, slots=True)
class CudaChooseExperts:
    """The op over the kernels of one device."""

    machine: Machine
    parts: Parts
    _said: set[str] = field(default_factory=set)

    def __call__(
        self,
        hidden: torch.Tensor,
        gate: PackedDense,
        routing: Routing,
        *,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
        normed: torch.Tensor,
        logits: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """See the contract."""
        if not self._takes(hidden, gate, routing, normed):
            self.parts.rms_norm(hidden, norm_weight, eps, normed)
            self.parts.dense_linear(normed, gate, None, None, logits)
            self.parts.route(logits, bias, routing, out)
            return
        check_rms_norm(hidden, norm_weight, normed, dtypes=ACTIVATIONS)
        ids, weights = check_route(logits, bias, routing, out)
        assert isinstance(gate, CudaDense)
        tokens, width = hidden.shape
        self.machine.programs.kernel(choice_spec(routing, width, tokens))(
            (-(-tokens // _tokens(tokens)), RANKS, 1), _threads(width),
            (
                hidden, hidden.stride(0), norm_weight, eps, gate.weight, bias, routing.scale, normed, ids, weights,
                tokens,
            ), overlap=True,
        )  # fmt: skip

    def _takes(self, hidden: torch.Tensor, gate: PackedDense, routing: Routing, normed: torch.Tensor) -> bool:
        """Whether the kernel is for such a step; of a router that it never takes the reason is told once."""
        if not 0 < len(hidden) <= MOST_TOKENS:
            return False
        exact = isinstance(gate, CudaDense) and gate.weight.dtype is torch.float32
        reason = unfit(routing, hidden.shape[1]) if exact else "a router that is not kept in float32"
        if reason is not None:
            if reason not in self._said:
                self._said.add(reason)
                logger.info("choose_experts: no single launch for %s; norm, router and choice are three", reason)
            return False
        dense = normed.is_contiguous() and hidden.stride(1) == 1 and hidden.stride(0) % 4 == 0
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (hidden, normed))
        return dense and aligned and hidden.dtype is torch.float32 and normed.dtype is torch.bfloat16


def unfit(routing: Routing, hidden: int) -> str | None:
    """Why a cluster's threads do not hold such a router in their registers, if so."""
    own = -(-routing.num_experts // RANKS)
    held = own * -(-hidden // (4 * _threads(hidden)))
    if hidden % 4 or own > _LANES or held > _MOST_HELD:
        return f"a router of {routing.num_experts} experts over {hidden} inputs"
    if max(routing.top_k, routing.num_groups) > _LANES:
        return f"{routing.top_k} experts a token out of {routing.num_groups} groups"
    return None


def choice_spec(routing: Routing, hidden: int, tokens: int) -> KernelSpec:
    """The kernel for so many tokens."""
    own, together, threads = -(-routing.num_experts // RANKS), _tokens(tokens), _threads(hidden)
    spread = 1 << (own - 1).bit_length()
    floats = together * (threads // _LANES * (1 + spread) + own) + 2 * routing.num_experts
    return spec(
        "expert_choice", "expert_choice", "plpfppfpppi", shared_bytes=4 * floats, TOKENS=together, THREADS=threads,
        HIDDEN=hidden, **routing_macros(routing),
    )  # fmt: skip


def _tokens(tokens: int) -> int:
    """Tokens of a cluster."""
    return 1 if tokens <= _ALONE else 4


def _threads(hidden: int) -> int:
    return min(_MOST_THREADS, -(-hidden // (4 * _LANES)) * _LANES)
