"""What a step must read at least, by the model's own sizes, and what it takes at the bandwidth measured in the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.benchmarks.gpu.random_model import LLAMA_8B, QWEN_7B, V2_LITE, Shape

TARGETS_TOKENS_PER_S = {
    (LLAMA_8B.name, 1, 1024): 480.0,
    (QWEN_7B.name, 1, 1024): 520.0,
    (V2_LITE.name, 1, 1024): 880.0,
    (V2_LITE.name, 16, 1024): 6500.0,
}
"""By model, batch and context; a cache in any format."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one decode step reads."""

    weights: float
    cache: float

    def seconds(self, bandwidth_bytes_per_s: float) -> float:
        """At the bandwidth of this very GPU."""
        return (self.weights + self.cache) / bandwidth_bytes_per_s


def int4_bytes(out_features: int, in_features: int, group_size: int) -> float:
    """A weight of 4 bits with a half-precision scale and a 4-bit zero a group."""
    return out_features * in_features * (0.5 + 2.5 / group_size)


def step_bytes(shape: Shape, batch: int, context: int, cache_bytes_per_token: int) -> StepBytes:
    """Weights once (experts: those that `batch` tokens are expected to choose), and every request's cache once."""
    config = shape.config
    size = config["quantization_config"]["group_size"]
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attention = _latent(config, size) if "kv_lora_rank" in config else _grouped(config, size)
    if "n_routed_experts" in config:
        dense = config["first_k_dense_replace"]
        mlp = dense * _gated(hidden, config["intermediate_size"], size) + (layers - dense) * _experts(
            config, size, batch
        )
    else:
        mlp = layers * _gated(hidden, config["intermediate_size"], size)
    head = 2 * config["vocab_size"] * hidden
    return StepBytes(layers * attention + mlp + head, float(batch * context * cache_bytes_per_token))


def _gated(hidden: int, inner: int, size: int) -> float:
    return int4_bytes(2 * inner, hidden, size) + int4_bytes(hidden, inner, size)


def _grouped(config: dict[str, Any], size: int) -> float:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = hidden // heads
    return int4_bytes((heads + 2 * kv_heads) * width, hidden, size) + int4_bytes(hidden, heads * width, size)


def _latent(config: dict[str, Any], size: int) -> float:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    down = int4_bytes(heads * (nope + rope) + rank + rope, hidden, size)
    return down + float(2 * heads * (nope + value) * rank) + int4_bytes(hidden, heads * value, size)


def _experts(config: dict[str, Any], size: int, batch: int) -> float:
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    chosen = float(count * (1 - (1 - config["num_experts_per_tok"] / count) ** batch))
    shared = _gated(hidden, inner * config["n_shared_experts"], size)
    return chosen * _gated(hidden, inner, size) + shared + float(4 * count * hidden)
