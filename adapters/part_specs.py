"""What the parts of a decoder layer are, as data read from `config.json`: kinds of attention and of MLP."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_tgi.kernels.route import Routing

__all__ = ["Attention", "GatedMlp", "GroupedQueryAttention", "LatentAttention", "MixtureOfExperts", "Routing"]


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Attention with one K/V head for each group of query heads. `qk_norm`: RMS norm of each head before rope."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool

    @property
    def q_width(self) -> int:
        """Columns of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all key heads together (the value heads have as many)."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(silu(gate(x)) * up(x))`."""

    intermediate_size: int
    bias: bool


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over one cached latent and one rotary key a token (MLA). `q_lora_rank` None: queries in one product.

    `rope_interleave`: neighbouring elements form a rotated pair in file order, else halves do.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool
    rope_interleave: bool

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: the part without position and the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts beside a shared one, in every layer from `first_layer` on that `every` divides.

    `shared_size` is the width of all shared experts together (0: none). The routing itself is `routing`.
    """

    intermediate_size: int
    shared_size: int
    first_layer: int
    every: int
    routing: Routing

    def in_layer(self, index: int) -> bool:
        """True if layer `index` has experts, false if its MLP is dense."""
        return index >= self.first_layer and index % self.every == 0


Attention = GroupedQueryAttention | LatentAttention
