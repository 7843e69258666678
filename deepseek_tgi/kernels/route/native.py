"""Routing on the C++ library: one call for all tokens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from deepseek_tgi.kernels.library import NativeLibrary, RouteCall
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.route.check import Out, check_route

_RANKS = {GroupRank.NONE: 0, GroupRank.BEST: 1, GroupRank.BEST_TWO: 2}


@dataclass(frozen=True, slots=True)
class RouteOp:
    """The op over one library. Keeps the C form of every routing it has seen: a model has one."""

    library: NativeLibrary
    num_threads: int
    _calls: dict[Routing, RouteCall] = field(default_factory=dict)

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, out: Out | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the contract."""
        ids, weights = check_route(logits, bias, routing, out)
        call = self._calls.get(routing) or self._make(routing)
        self.library.pass_handle(logits.numel()).dstgi_route(
            ctypes.addressof(call), logits.data_ptr(), None if bias is None else bias.data_ptr(), logits.shape[0],
            ids.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    def _make(self, routing: Routing) -> RouteCall:
        call = RouteCall(
            routing.num_experts, routing.top_k, routing.num_groups, routing.top_groups, _RANKS[routing.group_rank],
            routing.scoring is Scoring.SIGMOID, routing.normalise, self.num_threads, routing.scale,
        )  # fmt: skip
        self._calls[routing] = call
        return call
