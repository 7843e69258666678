"""Llama: DeepSeek LLM, DeepSeek Coder, R1-Distill-Llama, SmolLM2. Norm, attention, norm, gated MLP."""

from __future__ import annotations

from deepseek_tgi.adapters.layers.attention import Attention
from deepseek_tgi.adapters.layers.mlp import Mlp
from deepseek_tgi.adapters.layers.part import Part
from deepseek_tgi.adapters.model_config import ModelConfig
from deepseek_tgi.adapters.weights import WeightSource


def layer(config: ModelConfig, source: WeightSource, index: int) -> tuple[Part, ...]:
    """Load decoder layer `index`."""
    name = f"model.layers.{index}"
    return (
        Attention.load(source, f"{name}.self_attn", f"{name}.input_layernorm", config, index),
        Mlp.load(source, f"{name}.mlp", f"{name}.post_attention_layernorm", config, config.mlp),
    )
