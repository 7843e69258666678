"""What TGI itself would need for the same model, by how its own server keeps weights and cache.

Source: text-generation-inference 3.3.6, `models/custom_modeling/flash_deepseek_v2_modeling.py` (every head's keys and
values are expanded and padded to the wider of the two) and `layers/attention/kv_cache.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_tgi.adapters.model_config import LatentAttention, ModelConfig
from deepseek_tgi.adapters.plan import WeightPlan

HALF_BYTES = 2
"""TGI computes and caches in 16 bits on a GPU unless told otherwise; what is quantised stays as it is stored."""


@dataclass(frozen=True, slots=True)
class TgiNeeds:
    """Bytes over all ranks: of weights, and of one token in the cache."""

    weight_bytes: int
    bytes_per_token: int


def tgi_needs(config: ModelConfig, weights: WeightPlan) -> TgiNeeds:
    """What TGI needs for `config` with the weights of `weights`."""
    total = sum(
        line.parameters * HALF_BYTES if line.form in ("float32", "float16", "bfloat16") else line.stored_bytes
        for line in weights.lines
    )
    return TgiNeeds(total, cache_bytes_per_token(config))


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token in all layers, in 16 bits."""
    spec = config.attention
    if isinstance(spec, LatentAttention):
        width = spec.num_attention_heads * max(spec.qk_head_dim, spec.v_head_dim)
    else:
        width = spec.kv_width
    return config.num_hidden_layers * 2 * width * HALF_BYTES
