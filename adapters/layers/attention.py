"""Grouped-query attention over the paged cache: `hidden += o(attend(rope(qkv(norm(hidden)))))`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.layers.part import Part, StepContext, cut, padded
from deepseek_tgi.adapters.model_config import GroupedQueryAttention, ModelConfig
from deepseek_tgi.adapters.weights import WeightSource
from deepseek_tgi.kernels.select import KernelSet


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The tensors of one attention part; `q_norm`/`k_norm` act on each head before rope (Qwen3) or are None."""

    norm: RmsNorm
    qkv: Linear
    output: Linear
    q_norm: RmsNorm | None = None
    k_norm: RmsNorm | None = None


class Attention(Part):
    """Attention of one layer. q, k and v are one product; its output buffer is rotated and read in place."""

    def __init__(self, layer: int, spec: GroupedQueryAttention, weights: AttentionWeights, kernels: KernelSet) -> None:
        self._layer = layer
        self._spec = spec
        self._weights = weights
        self._kernels = kernels
        self._scale = spec.head_dim**-0.5
        self._widths = (weights.norm.size, spec.q_width + 2 * spec.kv_width, spec.q_width)

    @classmethod
    def load(cls, source: WeightSource, name: str, norm: str, config: ModelConfig, layer: int) -> Attention:
        """Read module `name` (for example `model.layers.0.self_attn`) and the norm before it."""
        spec, hidden, eps = config.attention, config.hidden_size, config.rms_norm_eps
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        widths = (spec.q_width, spec.kv_width, spec.kv_width)
        weights = AttentionWeights(
            norm=source.norm(norm, hidden, eps),
            qkv=source.linear(names, widths, hidden, spec.qkv_bias),
            output=source.linear((f"{name}.o_proj",), (hidden,), spec.q_width, spec.output_bias),
            q_norm=source.norm(f"{name}.q_norm", spec.head_dim, eps) if spec.qk_norm else None,
            k_norm=source.norm(f"{name}.k_norm", spec.head_dim, eps) if spec.qk_norm else None,
        )
        return cls(layer, spec, weights, source.kernels)

    @property
    def scratch_floats(self) -> int:
        """See `Part`."""
        return sum(padded(w) for w in self._widths)

    @property
    def binding(self) -> tuple[Any, ...]:
        """See `Part`."""
        return ("attention", self._widths, self._spec)

    @property
    def nbytes(self) -> int:
        """See `Part`."""
        w = self._weights
        norms = sum(n.nbytes for n in (w.norm, w.q_norm, w.k_norm) if n is not None)
        return norms + w.qkv.nbytes + w.output.nbytes

    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Buffers `normed [T, H]`, `qkv [T, W]`, its views `q [T, Hq, D]`, `k`, `v [T, G, D]`, and `context` twice."""
        spec = self._spec
        normed, qkv, context = cut(scratch, num_tokens, self._widths)
        q_end, k_end = spec.q_width, spec.q_width + spec.kv_width
        q, k, v = qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:]
        heads = (num_tokens, spec.num_attention_heads, spec.head_dim)
        kv_heads = (num_tokens, spec.num_key_value_heads, spec.head_dim)
        return normed, qkv, q.view(heads), k.view(kv_heads), v.view(kv_heads), context.view(heads), context

    def __call__(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        """See `Part`."""
        normed, qkv, q, k, v, context, context_rows = buffers
        weights, kernels, inputs = self._weights, self._kernels, step.inputs
        pages = step.pages[self._layer]
        weights.qkv.after_norm(hidden, weights.norm, normed, qkv)
        if weights.q_norm is not None and weights.k_norm is not None:
            weights.q_norm(q, q)
            weights.k_norm(k, k)
        kernels.rope(q, k, inputs.positions, step.cos_sin)
        kernels.kv_write(pages, k, v, inputs.slots)
        kernels.paged_attention(q, pages, inputs, self._scale, context)
        weights.output(context_rows, hidden, hidden)
