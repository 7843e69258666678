"""Which kind of cache a model needs: the joint between its config and `kv.layout`. No torch here."""

from __future__ import annotations

from deepseek_tgi.adapters.model_config import LatentAttention, ModelConfig
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.kv.layout import PER_HEAD_MODES, CacheLayout, KVLayout, KVMode, LatentLayout


def cache_modes(config: ModelConfig) -> tuple[KVMode, ...]:
    """The number formats that the model's kind of cache can have."""
    return tuple(KVMode) if isinstance(config.attention, LatentAttention) else PER_HEAD_MODES


def cache_layout(config: ModelConfig, mode: KVMode, block_size: int) -> CacheLayout:
    """How the cache of `config` lies in memory. Raises `ConfigError` for a format that its kind of cache has not."""
    spec = config.attention
    if isinstance(spec, LatentAttention):
        return LatentLayout(config.num_hidden_layers, spec.kv_lora_rank, spec.qk_rope_head_dim, mode, block_size)
    if mode not in PER_HEAD_MODES:
        known = ", ".join(each.value for each in PER_HEAD_MODES)
        raise ConfigError(f"kv_cache_dtype: got {mode.value}, expected one of {known} for {config.model_type}")
    return KVLayout(config.num_hidden_layers, spec.num_key_value_heads, spec.head_dim, spec.head_dim, mode, block_size)
