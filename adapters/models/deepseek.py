"""DeepSeek-V2 and V3 (V2-Lite, Coder-V2, V2.5, V3, R1, V3.1): latent attention, and experts behind the first layers."""

from __future__ import annotations

from deepseek_tgi.adapters.layers.mla import Mla
from deepseek_tgi.adapters.layers.mlp import Mlp
from deepseek_tgi.adapters.layers.moe import Moe
from deepseek_tgi.adapters.layers.part import Part
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.weights import WeightSource


def layer(config: ModelConfig, source: WeightSource, index: int) -> tuple[Part, ...]:
    """Load decoder layer `index`."""
    name = f"model.layers.{index}"
    attention = Mla.load(source, f"{name}.self_attn", f"{name}.input_layernorm", config, index)
    norm = f"{name}.post_attention_layernorm"
    if config.experts is not None and config.experts.in_layer(index):
        return attention, Moe.load(source, f"{name}.mlp", norm, config)
    return attention, Mlp.load(source, f"{name}.mlp", norm, config, config.mlp)
