"""The likeliest token, spelled out in torch."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.best_token import check_best_token


def best_token(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the contract."""
    check_best_token(logits, out)
    best = logits.max(-1)
    logprobs = logits.log_softmax(-1).gather(1, best.indices.unsqueeze(1)).squeeze(1)
    found = torch.stack((best.indices.float(), logprobs, best.values))
    return found if out is None else out.copy_(found)


def token_ids(values: torch.Tensor, out: torch.Tensor, limit: int) -> None:
    """See `TokenIds`."""
    out.copy_(values.nan_to_num(0.0).clamp(0, limit - 1))
