"""Multi-head latent attention: one latent and one rotary key a token are cached, for all heads together.

The rows of every query head are put in the order rotary part, rest, and pairs that the checkpoint rotates as neighbours
are taken apart into halves; both happen once, at load, so the kernels rotate the first elements of a head by halves as
for every other family. Scores do not change: queries and keys are reordered alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from deepseek_tgi.adapters.layers.linear import Linear
from deepseek_tgi.adapters.layers.norm import RmsNorm
from deepseek_tgi.adapters.layers.part import AttentionPart, StepContext, cut, floats_of
from deepseek_tgi.adapters.layers.rope import softmax_factor
from deepseek_tgi.adapters.model_config import LatentAttention, ModelConfig
from deepseek_tgi.adapters.weights import WeightSource
from deepseek_tgi.adapters.workspace import latent_sizes
from deepseek_tgi.kernels.latent_attention import PackedUp

INNER_EPS = 1e-6
"""Of the norms of the latent and of the low-rank queries: DeepSeek's published code makes both without the config's
`rms_norm_eps`, which is the same number in all its checkpoints."""


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """The tensors of one part. `down` makes the queries (or their low-rank form) and the latent with its rotary key;
    `query` and `query_norm` are None where queries need no second product.
    """

    norm: RmsNorm
    down: Linear
    query_norm: RmsNorm | None
    query: Linear | None
    latent_norm: RmsNorm
    up: PackedUp
    output: Linear

    @property
    def nbytes(self) -> int:
        """Bytes as held in memory."""
        parts = (self.norm, self.down, self.query_norm, self.query, self.latent_norm, self.up, self.output)
        return sum(part.nbytes for part in parts if part is not None)


class Mla(AttentionPart):
    """Latent attention of one layer."""

    ops = ("latent_prepare", "latent_attention")

    def __init__(self, layer: int, config: ModelConfig, weights: MlaWeights, source: WeightSource) -> None:
        spec = config.attention
        assert isinstance(spec, LatentAttention), "the family's reader gives latent attention"
        self._layer = layer
        self._spec = spec
        self._weights = weights
        self._prepare = source.kernels.latent_prepare
        self._attend = source.kernels.latent_attention
        self._whole = source.kernels.latent_layer
        self._form = source.latent_form
        self._scale = spec.qk_head_dim**-0.5 * softmax_factor(config.rope)
        self._heads = weights.up.num_heads
        self._kept = replace(latent_sizes(spec, config.max_position_embeddings), num_heads=self._heads)
        self._threads = source.kernels.num_threads if source.kernels.name == "native" else 0
        self._dtype = source.kernels.activation_dtype
        first = spec.q_lora_rank or self._heads * spec.qk_head_dim
        second = self._heads * spec.qk_head_dim if spec.q_lora_rank else 0
        latent = spec.kv_lora_rank + spec.qk_rope_head_dim
        normed = max(weights.norm.size, spec.q_lora_rank or 0)
        self._widths = (normed, first + latent, second, self._heads * spec.v_head_dim)

    @classmethod
    def load(cls, source: WeightSource, name: str, norm: str, config: ModelConfig, layer: int) -> Mla:
        """Read module `name` (for example `model.layers.0.self_attn`) and the norm before it."""
        spec, hidden, eps = config.attention, config.hidden_size, config.rms_norm_eps
        assert isinstance(spec, LatentAttention), "the family's reader gives latent attention"
        queries = spec.num_attention_heads * spec.qk_head_dim
        latent = spec.kv_lora_rank + spec.qk_rope_head_dim
        first, width = ("q_a_proj", spec.q_lora_rank) if spec.q_lora_rank else ("q_proj", queries)
        q_rows, latent_rows = query_rows(spec), latent_row_order(spec)
        rows = (None if spec.q_lora_rank else q_rows, latent_rows)
        # Queries made in one product have no bias, whatever `attention_bias` says.
        biases = (spec.bias and spec.q_lora_rank is not None, spec.bias)
        query = query_norm = None
        if spec.q_lora_rank:
            query_norm = source.norm(f"{name}.q_a_layernorm", spec.q_lora_rank, INNER_EPS)
            query = source.linear((f"{name}.q_b_proj",), (queries,), spec.q_lora_rank, False, (q_rows,))
        up_rows = spec.num_attention_heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        up = source.dense(f"{name}.kv_b_proj", up_rows, spec.kv_lora_rank)
        weights = MlaWeights(
            norm=source.norm(norm, hidden, eps),
            down=source.linear(
                (f"{name}.{first}", f"{name}.kv_a_proj_with_mqa"), (width, latent), hidden, biases, rows
            ),
            query_norm=query_norm,
            query=query,
            latent_norm=source.norm(f"{name}.kv_a_layernorm", spec.kv_lora_rank, INNER_EPS),
            up=source.kernels.pack_up(up, spec.num_attention_heads, spec.qk_nope_head_dim),
            output=source.linear((f"{name}.o_proj",), (hidden,), spec.num_attention_heads * spec.v_head_dim, spec.bias),
        )
        return cls(layer, config, weights, source)

    def scratch_floats(self, num_tokens: int) -> int:
        """See `Part`."""
        return num_tokens * floats_of(self._widths, self._dtype)

    def kept_floats(self, num_tokens: int) -> int:
        """See `Part`."""
        return self._kept.native_floats(num_tokens, self._threads) if self._threads else 0

    @property
    def binding(self) -> tuple[Any, ...]:
        """See `Part`."""
        return ("mla", self._widths, self._spec)

    @property
    def nbytes(self) -> int:
        """See `Part`."""
        return self._weights.nbytes

    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Buffers `normed [T, H]`, `down [T, W]` and its part `low [T, Rq]` with room for its norm, `q` as rows and as
        heads, `latent [T, R]` and `rope [T, Dr]`, views of `down`, and the `context` as heads and as rows.
        """
        spec, rank = self._spec, self._spec.q_lora_rank or 0
        _, down, queries, context = cut(scratch, num_tokens, self._widths, self._dtype)
        # The first stretch holds one of two norms at a time: that of the residual stream is used up by then.
        normed, low_normed = (cut(scratch, num_tokens, (n,), self._dtype)[0] for n in (self._weights.norm.size, rank))
        low = down[:, :rank]
        latent = down[:, -(spec.kv_lora_rank + spec.qk_rope_head_dim) : -spec.qk_rope_head_dim]
        rope = down[:, -spec.qk_rope_head_dim :]
        rows = queries if spec.q_lora_rank else down[:, : self._heads * spec.qk_head_dim]
        q = rows.view(num_tokens, self._heads, spec.qk_head_dim)
        heads = context.view(num_tokens, self._heads, spec.v_head_dim)
        return normed, down, low, low_normed, rows, q, latent, rope, heads, context

    def before(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...]) -> None:
        """See `AttentionPart`."""
        normed, down, low, low_normed, rows = buffers[:5]
        w = self._weights
        w.down.after_norm(hidden, w.norm, normed, down)
        if w.query is not None:
            assert w.query_norm is not None, "both or neither"
            w.query.after_norm(low, w.query_norm, low_normed, rows)

    def attend(self, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        """See `AttentionPart`."""
        q, latent, rope, context, _ = buffers[5:]
        w = self._weights
        pages, norm = step.latent_pages(self._layer), w.latent_norm
        if self._whole is not None:
            self._whole(
                q, latent, rope, pages, step.inputs, up=w.up, norm_weight=norm.weight, eps=norm.eps,
                cos_sin=step.cos_sin, scale=self._scale, out=context, form=self._form,
            )  # fmt: skip
        else:
            self._prepare(
                q, latent, rope, pages, step.inputs, norm_weight=norm.weight, eps=norm.eps, cos_sin=step.cos_sin
            )
            self._attend(q, pages, w.up, step.inputs, scale=self._scale, out=context, form=self._form)

    def after(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...]) -> None:
        """See `AttentionPart`."""
        self._weights.output(buffers[-1], hidden, hidden)


def query_rows(spec: LatentAttention) -> torch.Tensor:
    """Order in which the rows of the query projection are read: every head's rotary part (in halves) first."""
    rope = spec.qk_nope_head_dim + halves(spec.qk_rope_head_dim, spec.rope_interleave)
    head = torch.cat((rope, torch.arange(spec.qk_nope_head_dim)))
    starts = torch.arange(spec.num_attention_heads).unsqueeze(1) * spec.qk_head_dim
    return (starts + head).flatten()


def latent_row_order(spec: LatentAttention) -> torch.Tensor:
    """Order in which the rows of `kv_a_proj_with_mqa` are read: the latent as it is, the rotary key in halves."""
    rope = spec.kv_lora_rank + halves(spec.qk_rope_head_dim, spec.rope_interleave)
    return torch.cat((torch.arange(spec.kv_lora_rank), rope))


def halves(dim: int, interleaved: bool) -> torch.Tensor:
    """`[dim]`: where element i of the half-split order stands in the file."""
    order = torch.arange(dim)
    return torch.cat((order[::2], order[1::2])) if interleaved else order
