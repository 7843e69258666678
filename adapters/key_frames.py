"""Where a layer's `Frame` comes from: the bias of its key projection, or what it does with some text.

Choice: for an INT8 or FP8 cache the centre of keys is the bias of `k_proj`, as far as it is large beside what keys vary
by, which random hidden states show: no data, exact. For an INT4 cache the model reads a fixed text of some 200 tokens
when it is loaded, and the centre is the mean key of each head, which holds any bias; the text also shows the direction
in which queries see keys. A pair of elements that adds less than its part to what low bits lose stays out of the
centre, for each pair costs a step of every score.
Prevents: 4-bit keys of llama-family models that lose 9 % of perplexity, for their keys have a large constant part
without any bias. Rejected: means over random tokens (a third more loss), means over requests served (cached bytes would
depend on the traffic), a file of statistics beside the checkpoint (one more thing to make, ship and get wrong).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.qkv_attention import HeadNorms, QkvAttention
from deepseek_tgi.kernels.rms_norm import RmsNorm
from deepseek_tgi.kernels.vector_store import int4_error

MAX_TOKENS, FEWEST_TOKENS = 256, 16
TEXT = """The old harbour wakes before the town does. Boats come in at half past four with crates of fish, and by six
the first lorries are on the road to the market. "How much for the cod?" asks a woman in a blue coat; she pays in coins
and walks on. Water boils at 100 degrees Celsius at sea level, but at 2,400 metres it needs only 92.

# Questions
1. What is the capital of Norway?  Oslo.
2. Why is the sky blue? Because short waves of light are scattered more than long ones.

def mean(values):
    total = sum(values)
    return total / len(values) if values else 0.0

| item | price |
| --- | --- |
| bread | 3.20 |

The theorem follows: if x > 0 and y = x^2 + 1, then y > 1. Nobody had expected the committee to agree, yet on Tuesday,
after a long debate, it did. Les enfants jouent dans le jardin; die Kinder spielen im Garten. Please reply to this
letter within fourteen days, and keep a copy of the form for your records.
"""
_BIAS_LEFT_OUT = 1e-4
"""Part of a bias' squared length that may stay in the keys: a hundredth of its length."""
_MEAN_LEFT_OUT = 0.001
"""As a part of what keys vary by, squared."""
_DISTANCES = tuple(2**n for n in range(10))
"""How far behind a query a key stands, in tokens."""
LARGEST_SCORE_ERROR = 0.5
"""In nats, root of the mean square over the text: 4-bit keys of the models measured are off by 0.05 to 0.15."""


def bias_frame(bias: torch.Tensor, rotary: int, varies: torch.Tensor) -> Frame:
    """The frame of keys `[G, D]` whose projection has `bias [G, D] float32`; `varies [G]` is their own, squared."""
    limit = torch.maximum(bias.square().sum(-1) * _BIAS_LEFT_OUT, varies * _MEAN_LEFT_OUT)
    centre = _strongest(bias, rotary, limit)
    return Frame(centre=centre) if bool(centre.any()) else Frame()


def frame_of(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> Frame | None:
    """The frame of a layer that made `q [T, H, D]`, `k [T, G, D]` of a text, before rotation; None if not all finite.

    The first token is left out: attention rests on it, and its key is like no other.
    """
    q, k = q[1:].double(), k[1:].double()
    if not bool(q.isfinite().all() and k.isfinite().all()):
        return None
    centre = k.mean(0)
    varies = (k - centre).square().sum(-1).mean(0)  # [G]
    looks = [_turned(q, cos_sin[n].double()) for n in _DISTANCES if n < len(cos_sin)]
    looks = [x.view(len(x), k.shape[1], -1, k.shape[2]) for x in looks]
    seen = torch.cat(looks).transpose(0, 1).flatten(1, 2)  # [G, n, D]
    values, vectors = torch.linalg.eigh(seen.transpose(1, 2) @ seen / seen.shape[1])
    along = values[:, -1] / values.sum(-1).clamp(min=1e-30)
    weight = along * (k.shape[2] - 1) / (1 - along).clamp(min=1e-3)
    rotary = cos_sin.shape[1]
    return Frame(
        _strongest(centre.float(), rotary, varies.float() * _MEAN_LEFT_OUT),
        vectors[:, :, -1].float().contiguous(),
        weight.float(),
    )


@dataclass(slots=True)
class LearningAttention:
    """Attends as `attend` does, over a cache in float32, and keeps the frame that an INT4 cache would want."""

    attend: QkvAttention
    rms_norm: RmsNorm
    frame: Frame | None = None
    score_error: float = 0.0
    """Root of the mean square, in nats, of the errors that keys in this frame put on the text's scores."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: LayerPages,
        inputs: ForwardInputs,
        *,
        cos_sin: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        head_norms: HeadNorms | None = None,
        frame: Frame | None = None,
    ) -> torch.Tensor:
        """See `QkvAttention`."""
        if head_norms is not None:
            self.rms_norm(q, head_norms.q, head_norms.eps, q)
            self.rms_norm(k, head_norms.k, head_norms.eps, k)
        self.frame = frame_of(q, k, cos_sin)
        self.attend(q, k, v, pages, inputs, cos_sin=cos_sin, scale=scale, out=out)
        if self.frame is not None:
            placed = PlacedFrame(self.frame, inputs.positions, cos_sin)
            self.score_error = _score_error(q, int4_error(k, placed, inputs.positions), scale)
        return out


def with_scales(frame: Frame | None, k_scale: float | None, v_scale: float | None) -> Frame | None:
    """`frame` with FP8 scales; None if there is nothing to say."""
    frame = replace(frame or Frame(), k_scale=k_scale, v_scale=v_scale, native=[])
    return None if frame == Frame() else frame


def _score_error(q: torch.Tensor, error: torch.Tensor, scale: float) -> float:
    """Of rotated queries `q [T, H, D]` against keys that are off by `error [T, G, D]`."""
    grouped = q.float().reshape(*error.shape[:2], -1, error.shape[2])  # [T, G, R, D]
    off = torch.einsum("tgrd,sgd->grts", grouped, error) * scale
    causal = torch.ones(off.shape[-2:], dtype=torch.bool, device=off.device).tril()
    return float(off[..., causal].square().mean().sqrt())


def _turned(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """`x [..., D]` rotated by one row of the table."""
    half = len(row) // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * row[:half] - b * row[half:], b * row[:half] + a * row[half:], rest), -1)


def _strongest(centre: torch.Tensor, rotary: int, limit: torch.Tensor) -> torch.Tensor:
    """`centre [G, D]` without its weakest pairs, whose squared lengths may add up to `limit [G]`."""
    half = rotary // 2
    energy = centre[:, :half].square() + centre[:, half:rotary].square()
    ordered, order = energy.sort(-1)
    weakest = ordered.cumsum(-1) <= limit.unsqueeze(-1)
    dropped = torch.zeros_like(weakest).scatter(-1, order, weakest)
    kept = torch.cat((~dropped, ~dropped, torch.ones_like(centre[:, rotary:], dtype=torch.bool)), -1)
    return torch.where(kept, centre, 0.0).contiguous()
