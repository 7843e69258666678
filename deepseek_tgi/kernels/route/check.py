"""What every implementation of routing checks. Apart from the contract, which needs no torch."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import describe, refuse
from deepseek_tgi.kernels.route import Routing

Out = tuple[torch.Tensor, torch.Tensor]


def check_route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, out: Out | None) -> Out:
    """The tensors to write to: `out`, or fresh ones. Raises `GenerationError` for operands that do not fit."""
    experts, rows = routing.num_experts, logits.shape[0]
    if not (_is(logits, torch.float32, (rows, experts)) and logits.is_contiguous()):
        refuse(f"route: got {describe('logits', logits)}, expected [T, {experts}] float32, contiguous")
    if bias is not None and not (_is(bias, torch.float32, (experts,)) and bias.is_contiguous()):
        refuse(f"route: got {describe('bias', bias)}, expected [{experts}] float32, contiguous")
    if experts % routing.num_groups or routing.top_k > experts // routing.num_groups * routing.top_groups:
        refuse(f"route: {routing} chooses more experts than its groups have")
    shape = (rows, routing.top_k)
    if out is None:
        return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)
    ids, weights = out
    if not (_is(ids, torch.int32, shape) and _is(weights, torch.float32, shape)):
        refuse(f"route: got {describe('ids', ids)} and {describe('weights', weights)}, expected {list(shape)}")
    if not (ids.is_contiguous() and weights.is_contiguous()):
        refuse("route: ids and weights are to be contiguous")
    return ids, weights


def _is(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return tensor.dtype is dtype and tuple(tensor.shape) == shape
