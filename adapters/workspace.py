"""What a step takes beyond weights and cache, as arithmetic on the model's sizes. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deepseek_tgi.adapters.model_config import GroupedQueryAttention, LatentAttention, MixtureOfExperts, ModelConfig
from deepseek_tgi.kernels.expert_scratch import ExpertSizes
from deepseek_tgi.kernels.latent_scratch import LatentSizes

ALIGNMENT_FLOATS = 16
"""Buffers start on 64-byte lines."""
TORCH_TILE_FLOATS = 8 << 20
"""What the torch kernels hold besides: a tile of unpacked weights and of attention scores, in several precisions."""


def padded(width: int) -> int:
    """`width` floats rounded up, so that the next buffer stays aligned."""
    return -(-width // ALIGNMENT_FLOATS) * ALIGNMENT_FLOATS


def padded_floats(width: int, item_bytes: int = 4) -> int:
    """Floats that `width` items take, rounded up alike."""
    return padded(-(-width * item_bytes // 4))


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What decides a step's temporary memory: `scratch_floats`, from a number of tokens to what the part takes that
    needs most and what kernels keep of their own, whether kernels are `native`, and whether the model runs in
    `several_ranks`.
    """

    scratch_floats: Callable[[int], int]
    hidden_size: int
    vocab_size: int
    native: bool
    several_ranks: bool = False

    def bytes_of(self, num_tokens: int, num_logit_rows: int) -> int:
        """Upper bound for so many tokens and logit rows, contexts being the step's own tokens.

        Kernels made of torch's operators return fresh tensors (an input and two outputs of the widest product at a
        time), convert weights tile by tile, and gather the context; the compiled ones work in place.
        """
        scratch = self.scratch_floats(num_tokens)
        floats = scratch + num_tokens * 2 * self.hidden_size
        floats += num_logit_rows * (self.hidden_size + self.vocab_size)
        if self.several_ranks:
            # Ranks exchange padded parts of the logits, and gloo's own copy of whatever is summed.
            floats += num_logit_rows * 2 * self.vocab_size + num_tokens * self.hidden_size
        if not self.native:
            floats += 3 * scratch + num_logit_rows * 2 * self.vocab_size + TORCH_TILE_FLOATS
        return 4 * floats


def scratch_floats(config: ModelConfig, native: bool, num_threads: int = 1) -> Callable[[int], int]:
    """From a number of tokens to the scratch floats of the part that needs most and what kernels keep: the parts' own
    figures, before they exist.
    """
    scratch, spec = _part_floats(config, native), config.attention
    if not native or not isinstance(spec, LatentAttention):
        return scratch
    sizes = latent_sizes(spec, config.max_position_embeddings)
    return lambda num_tokens: scratch(num_tokens) + sizes.native_floats(num_tokens, num_threads)


def latent_sizes(spec: LatentAttention, context: int) -> LatentSizes:
    """The widths of `spec` that decide what its kernels keep."""
    heads, dims = spec.num_attention_heads, (spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.v_head_dim)
    return LatentSizes(heads, spec.kv_lora_rank, *dims, context)


def _part_floats(config: ModelConfig, native: bool) -> Callable[[int], int]:
    spec, experts = config.attention, config.experts
    attention = _latent(spec, config.hidden_size) if isinstance(spec, LatentAttention) else _grouped(spec, config)
    widths = [attention]
    if experts is None or not all(experts.in_layer(index) for index in range(config.num_hidden_layers)):
        widths.append((config.hidden_size, 2 * config.mlp.intermediate_size, config.mlp.intermediate_size))
    per_token = max(_sum(part) for part in widths)
    if experts is None:
        return lambda num_tokens: num_tokens * per_token
    of_experts = partial(_expert_floats, experts, config.hidden_size, native)
    return lambda num_tokens: max(num_tokens * per_token, of_experts(num_tokens))


def _expert_floats(spec: MixtureOfExperts, hidden: int, native: bool, num_tokens: int) -> int:
    """Of a layer with experts: see the parts' `Moe`."""
    routing = spec.routing
    sizes = ExpertSizes.usual(routing.num_experts, hidden, spec.intermediate_size, spec.shared_size)
    own = num_tokens * _sum((hidden, routing.num_experts, routing.top_k, routing.top_k))
    grouped = sizes.native_floats(num_tokens, routing.top_k) if native else sizes.grouped_floats(num_tokens)
    return own + grouped


def _grouped(spec: GroupedQueryAttention, config: ModelConfig) -> Sequence[int]:
    return config.hidden_size, spec.q_width + 2 * spec.kv_width, spec.q_width


def _latent(spec: LatentAttention, hidden: int) -> Sequence[int]:
    queries = spec.num_attention_heads * spec.qk_head_dim
    latent = spec.kv_lora_rank + spec.qk_rope_head_dim
    second = queries if spec.q_lora_rank else 0
    normed = max(hidden, spec.q_lora_rank or 0)
    return normed, (spec.q_lora_rank or queries) + latent, second, spec.num_attention_heads * spec.v_head_dim


def _sum(widths: Sequence[int]) -> int:
    return sum(padded(width) for width in widths)
