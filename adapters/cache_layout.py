"""Which kind of cache a model needs: the joint between its config and `kv.layout`. No torch here."""

from __future__ import annotations

from deepseek_tgi.adapters.model_config import LatentAttention, ModelConfig
from deepseek_tgi.kv.layout import CacheLayout, KVLayout, KVMode, LatentLayout, head_fits_int4


def cache_modes(config: ModelConfig) -> tuple[KVMode, ...]:
    """The number formats that the model's kind of cache can have."""
    spec = config.attention
    every = isinstance(spec, LatentAttention) or head_fits_int4(spec.head_dim)
    return tuple(mode for mode in KVMode if every or mode is not KVMode.INT4)


def cache_layout(config: ModelConfig, mode: KVMode, block_size: int) -> CacheLayout:
    """How the cache of `config` lies in memory. Raises `ConfigError` for a format that its heads do not fit."""
    spec = config.attention
    if isinstance(spec, LatentAttention):
        return LatentLayout(config.num_hidden_layers, spec.kv_lora_rank, spec.qk_rope_head_dim, mode, block_size)
    return KVLayout(config.num_hidden_layers, spec.num_key_value_heads, spec.head_dim, spec.head_dim, mode, block_size)
