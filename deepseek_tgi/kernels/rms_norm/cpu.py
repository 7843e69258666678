"""RMS norm with torch's fused operator."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.common import ACTIVATIONS
from deepseek_tgi.kernels.rms_norm import check_rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the contract."""
    check_rms_norm(x, weight, out, ACTIVATIONS)
    y = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, eps)
    if out is None:
        return y.to(x.dtype).contiguous()
    out.copy_(y)
    return out
