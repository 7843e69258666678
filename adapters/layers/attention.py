"""Grouped-query attention over the paged cache: `hidden += o(attend(rope(qkv(norm(hidden)))))`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepseek_tgi.adapters.key_frames import LearningAttention, bias_frame, with_scales
from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.layers.part import AttentionPart, StepContext, cut, floats_of
from deepseek_tgi.adapters.model_config import GroupedQueryAttention, ModelConfig
from deepseek_tgi.adapters.weights import WeightSource
from deepseek_tgi.kernels.frame import Frame
from deepseek_tgi.kernels.qkv_attention import HeadNorms, QkvAttention
from deepseek_tgi.kernels.select import KernelSet

_DRAWS = 4
"""Hidden states of a sample; each shows a head's whole key."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The tensors of one attention part; `head_norms` act on each query and key head before rope (Qwen3)."""

    norm: RmsNorm
    qkv: Linear
    output: Linear
    head_norms: HeadNorms | None = None


class Attention(AttentionPart):
    """Attention of one layer. q, k and v are one product; its output buffer is rotated and read in place.

    Owner of the layer's `frame`, in which low-bit caches store; set before the first request is served.
    """

    ops = ("qkv_attention",)

    def __init__(
        self,
        layer: int,
        spec: GroupedQueryAttention,
        weights: AttentionWeights,
        kernels: KernelSet,
        frame: Frame | None = None,
    ) -> None:
        self._layer = layer
        self._spec = spec
        self._weights = weights
        self._attend: QkvAttention = kernels.qkv_attention
        self._kernels = kernels
        self.frame = frame
        self._scale = spec.head_dim**-0.5
        self._dtype = kernels.activation_dtype
        self._widths = (weights.norm.size, spec.q_width + 2 * spec.kv_width, spec.q_width)

    @classmethod
    def load(cls, source: WeightSource, name: str, norm: str, config: ModelConfig, layer: int) -> Attention:
        """Read module `name` (for example `model.layers.0.self_attn`) and the norm before it."""
        spec, hidden, eps = config.attention, config.hidden_size, config.rms_norm_eps
        assert isinstance(spec, GroupedQueryAttention), "the family's reader gives grouped heads"
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        widths = (spec.q_width, spec.kv_width, spec.kv_width)
        weights = AttentionWeights(
            norm=source.norm(norm, hidden, eps),
            qkv=source.linear(names, widths, hidden, spec.qkv_bias),
            output=source.linear((f"{name}.o_proj",), (hidden,), spec.q_width, spec.output_bias),
            head_norms=_load_head_norms(source, name, spec.head_dim, eps) if spec.qk_norm else None,
        )
        frame = None
        if spec.qkv_bias:
            bias = source.bias(f"{name}.k_proj", spec.kv_width).view(spec.num_key_value_heads, spec.head_dim)
            frame = bias_frame(bias, config.rope_dim, _variation(weights, spec, source.kernels, bias))
        return cls(layer, spec, weights, source.kernels, with_scales(frame, *source.cache_scales(name)))

    def start_learning(self) -> LearningAttention:
        """From now on keep what an INT4 cache wants to know of queries and keys; ended by `finish_learning`."""
        learning = LearningAttention(self._attend, self._kernels.rms_norm)
        self._attend = learning
        return learning

    def finish_learning(self) -> None:
        """Store in the frame that was learned from here on; in the old one if there was nothing to learn."""
        learning = self._attend
        assert isinstance(learning, LearningAttention), "learning was started"
        self._attend = learning.attend
        if learning.frame is not None:
            old = self.frame or Frame()
            self.frame = with_scales(learning.frame, old.k_scale, old.v_scale)

    def scratch_floats(self, num_tokens: int) -> int:
        """See `Part`."""
        return num_tokens * floats_of(self._widths, self._dtype)

    @property
    def binding(self) -> tuple[Any, ...]:
        """See `Part`."""
        return ("attention", self._widths, self._spec)

    @property
    def nbytes(self) -> int:
        """See `Part`."""
        w = self._weights
        heads = w.head_norms.q.nbytes + w.head_norms.k.nbytes if w.head_norms is not None else 0
        return w.norm.nbytes + heads + w.qkv.nbytes + w.output.nbytes

    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Buffers `normed [T, H]`, `qkv [T, W]`, its views `q [T, Hq, D]`, `k`, `v [T, G, D]`, and `context` twice."""
        spec = self._spec
        normed, qkv, context = cut(scratch, num_tokens, self._widths, self._dtype)
        q_end, k_end = spec.q_width, spec.q_width + spec.kv_width
        q, k, v = qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:]
        heads = (num_tokens, spec.num_attention_heads, spec.head_dim)
        kv_heads = (num_tokens, spec.num_key_value_heads, spec.head_dim)
        return normed, qkv, q.view(heads), k.view(kv_heads), v.view(kv_heads), context.view(heads), context

    def before(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...]) -> None:
        """See `AttentionPart`."""
        self._weights.qkv.after_norm(hidden, self._weights.norm, buffers[0], buffers[1])

    def attend(self, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        """See `AttentionPart`."""
        _, _, q, k, v, context, _ = buffers
        self._attend(
            q, k, v, step.head_pages(self._layer), step.inputs, cos_sin=step.cos_sin, scale=self._scale, out=context,
            head_norms=self._weights.head_norms, frame=self.frame,
        )  # fmt: skip

    def after(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...]) -> None:
        """See `AttentionPart`."""
        self._weights.output(buffers[-1], hidden, hidden)


def _variation(
    weights: AttentionWeights, spec: GroupedQueryAttention, kernels: KernelSet, bias: torch.Tensor
) -> torch.Tensor:
    """By how much keys of each head vary, squared, `[G]`: those of hidden states that point anywhere alike.

    One row at a time, which takes the kernel that decoding takes.
    """
    widths = weights.norm.size, spec.q_width + 2 * spec.kv_width
    hidden = torch.randn(_DRAWS, widths[0], generator=torch.Generator().manual_seed(0)).to(kernels.device)
    normed, qkv = (torch.empty(1, width, dtype=kernels.activation_dtype, device=hidden.device) for width in widths)
    total = torch.zeros_like(bias)
    for draw in range(_DRAWS):
        weights.qkv.after_norm(hidden[draw : draw + 1], weights.norm, normed, qkv)
        keys = qkv[0, spec.q_width : spec.q_width + spec.kv_width].float().view(bias.shape)
        total += (keys - bias).square()
    return total.sum(-1) / _DRAWS


def _load_head_norms(source: WeightSource, name: str, head_dim: int, eps: float) -> HeadNorms:
    q, k = (source.norm(f"{name}.{which}", head_dim, eps).weight for which in ("q_norm", "k_norm"))
    return HeadNorms(q, k, eps)
