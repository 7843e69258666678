"""The FP8 number format of cached keys and values of one head, in plain torch: E4M3 bytes and a float16 scale a vector.

`x = e4m3 * scale`. The scale is the layer's own if the checkpoint has one (rounded to float16, and what lies beyond
448 scales saturates), else the vector's largest magnitude / 448 rounded up, so that nothing saturates. Either way it is
stored with the vector: what was written with a number is read with the same number.
Choice: a vector's own scale where the checkpoint has none. Prevents: small values falling out of E4M3's range; against
the fixed 1.0 that TGI falls back to, predictions of SmolLM2-135M diverge by 6.6e-3 instead of 10.9e-3 nats a token.
Rejected: a second, float32 scale for the layers that have one; float16 holds any scale in use to 11 bits.
"""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.int8_format import HALF_MAX, half_towards

E4M3_MAX = 448.0


def quantise_fp8(x: torch.Tensor, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise vectors along the last axis: `x [..., D] float32` -> `[..., D] uint8`, `scale [..., 1] float16`.

    `scale`, a float16 value, is the layer's own. A vector holding NaN gets a NaN scale, so that it reads back as NaN.
    """
    x = x.float().clamp(-HALF_MAX, HALF_MAX)
    largest = x.abs().amax(-1, keepdim=True)
    own = half_towards(largest / E4M3_MAX, up=True)
    if scale is not None:
        own = torch.where(largest.isnan(), own, scale)
    step = own.float()
    steps = torch.where(step.isnan(), 0.0, x / torch.where(step > 0, step, 1.0))
    return steps.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8), own


def dequantise_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantise_fp8`: `[..., D] float32`."""
    return codes.view(torch.float8_e4m3fn).float() * scale.float()
