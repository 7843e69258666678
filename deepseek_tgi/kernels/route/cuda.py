"""Routing on an NVIDIA GPU: one warp a token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.cuda.program import Programs, spec
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring
from deepseek_tgi.kernels.route.check import Out, check_route

TOKENS_A_BLOCK = 4
_LANES = 32

if TYPE_CHECKING:
    from deepseek_tgi.kernels.select import KernelSet


def provide(kernels: KernelSet) -> KernelSet:
    """See `kernels.device_set`."""
    return replace(kernels, route=CudaRoute(machine_of(kernels.device).programs))


class CudaRoute:
    """The op over the kernels of one device. Raises `ConfigError` for more choices or groups than a warp has lanes."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, out: Out | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the contract."""
        if max(routing.top_k, routing.num_groups) > _LANES:
            raise ConfigError(f"routing: got {routing}, expected at most {_LANES} choices and groups on a GPU")
        ids, weights = check_route(logits, bias, routing, out)
        tokens = len(logits)
        if tokens:
            kernel = self._programs.kernel(spec("route", "route", "ppfppi", **routing_macros(routing)))
            grid = (-(-tokens // TOKENS_A_BLOCK), 1, 1)
            kernel(grid, _LANES * TOKENS_A_BLOCK, (logits, bias, routing.scale, ids, weights, tokens), overlap=True)
        return ids, weights


def routing_macros(routing: Routing) -> dict[str, int]:
    """As `sources/route_token.cuh` names them."""
    return {
        "EXPERTS": routing.num_experts, "TOP": routing.top_k, "SIGMOID": int(routing.scoring is Scoring.SIGMOID),
        "RANKED": {GroupRank.NONE: 0, GroupRank.BEST: 1, GroupRank.BEST_TWO: 2}[routing.group_rank],
        "GROUPS": routing.num_groups, "KEPT": routing.top_groups, "NORMALISE": int(routing.normalise),
    }  # fmt: skip
