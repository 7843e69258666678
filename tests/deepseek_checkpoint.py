"""Configs and random weights of tiny DeepSeek-V2 and V3 models; `builders` writes them in every format.

Every width is another number, so that swapped sizes do not fit: key heads of 32 + 16, value heads of 48, latents of 64.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
YARN: Config = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
"""`rope_scaling` as the published V2 files have it, for a shorter original context."""
_ATTENTION: Config = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
_EXPERTS: Config = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
_FAMILIES: dict[str, Config] = {
    "deepseek_v2": {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "q_lora_rank": 192,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def deepseek_fields(family: str) -> Config:
    """What `config.json` of a tiny model has beside or instead of a llama's fields."""
    return {"intermediate_size": 192, **_ATTENTION, **_EXPERTS, **_FAMILIES[family]}


class _Draw:
    """Random tensors from one generator."""

    def __init__(self, seed: int, bias_scale: float) -> None:
        self._gen = torch.Generator().manual_seed(seed)
        self._bias_scale = bias_scale

    def linear(self, n: int, k: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(n, k, generator=self._gen) * (gain / math.sqrt(k))

    def near_one(self, n: int) -> torch.Tensor:
        return torch.normal(1.0, 0.2, (n,), generator=self._gen)

    def spread(self, n: int, scale: float) -> torch.Tensor:
        return torch.linspace(-scale, scale, n).index_select(0, torch.randperm(n, generator=self._gen))

    def bias(self, n: int) -> torch.Tensor:
        return self.spread(n, self._bias_scale)


def deepseek_weights(config: Config, seed: int, bias_scale: float) -> Tensors:
    """Float32 weights under HF names, so spread that rope, routing, groups and the correction bias show in logits.

    The layers of `num_nextn_predict_layers` come last, with everything a published file holds of them.
    """
    draw = _Draw(seed, bias_scale)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    spread = 0.2 if config["tie_word_embeddings"] else 1.0
    w = {"model.embed_tokens.weight": draw.linear(vocab, hidden, spread * math.sqrt(hidden))}
    for i in range(layers + config.get("num_nextn_predict_layers", 0)):
        w |= _layer(draw, config, i)
    for i in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        p = f"model.layers.{i}."
        w |= {f"{p}{name}.weight": draw.near_one(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        w[f"{p}eh_proj.weight"] = draw.linear(hidden, 2 * hidden)
        w[f"{p}embed_tokens.weight"] = w["model.embed_tokens.weight"].clone()
        w[f"{p}shared_head.head.weight"] = draw.linear(vocab, hidden)
    w["model.norm.weight"] = draw.near_one(hidden)
    if not config["tie_word_embeddings"]:
        w["lm_head.weight"] = draw.linear(vocab, hidden, 2.0)
    return w


def _layer(draw: _Draw, config: Config, index: int) -> Tensors:
    hidden, p = config["hidden_size"], f"model.layers.{index}."
    w = {
        f"{p}input_layernorm.weight": draw.near_one(hidden),
        f"{p}post_attention_layernorm.weight": draw.near_one(hidden),
    }
    w |= _attention(draw, config, f"{p}self_attn.")
    sparse = config.get("n_routed_experts") and index >= config["first_k_dense_replace"]
    if sparse and index % config.get("moe_layer_freq", 1) == 0:
        return w | _experts(draw, config, f"{p}mlp.")
    return w | _mlp(draw, hidden, config["intermediate_size"], f"{p}mlp.")


def _attention(draw: _Draw, c: Config, p: str) -> Tensors:
    hidden, heads, rank, low = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["q_lora_rank"]
    queries = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    latent = rank + c["qk_rope_head_dim"]
    w: Tensors = {}
    if low is None:
        w[f"{p}q_proj.weight"] = draw.linear(queries, hidden, 1.3)
    else:
        w[f"{p}q_a_proj.weight"] = draw.linear(low, hidden)
        w[f"{p}q_a_layernorm.weight"] = draw.near_one(low)
        w[f"{p}q_b_proj.weight"] = draw.linear(queries, low, 1.3)
    w[f"{p}kv_a_proj_with_mqa.weight"] = draw.linear(latent, hidden, 1.3)
    w[f"{p}kv_a_layernorm.weight"] = draw.near_one(rank)
    w[f"{p}kv_b_proj.weight"] = draw.linear(heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank, 1.3)
    w[f"{p}o_proj.weight"] = draw.linear(hidden, heads * c["v_head_dim"])
    if c.get("attention_bias"):
        biased = {"kv_a_proj_with_mqa": latent, "o_proj": hidden} | ({} if low is None else {"q_a_proj": low})
        w |= {f"{p}{name}.bias": draw.bias(n) for name, n in biased.items()}
    return w


def _mlp(draw: _Draw, hidden: int, inner: int, p: str) -> Tensors:
    sides = (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner))
    return {f"{p}{name}_proj.weight": draw.linear(n, k, 1.4) for name, n, k in sides}


def _experts(draw: _Draw, c: Config, p: str) -> Tensors:
    hidden, inner, experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    w = {f"{p}gate.weight": draw.linear(experts, hidden)}
    if c.get("topk_method") == "noaux_tc":
        w[f"{p}gate.e_score_correction_bias"] = draw.spread(experts, 0.3)
    for i in range(experts):
        w |= _mlp(draw, hidden, inner, f"{p}experts.{i}.")
    if c.get("n_shared_experts"):
        w |= _mlp(draw, hidden, inner * c["n_shared_experts"], f"{p}shared_experts.")
    return w


def as_transformers(config: Config, dense: Tensors) -> Tensors:
    """`dense` as the `transformers` modules name it: experts stacked, further-token layers left out."""
    layers, experts = config["num_hidden_layers"], config.get("n_routed_experts") or 0
    kept = {k: v for k, v in dense.items() if ".experts." not in k and _layer_of(k) < layers}
    for i in range(layers):
        p = f"model.layers.{i}.mlp.experts."
        if f"{p}0.up_proj.weight" in dense:
            parts = {n: [dense[f"{p}{e}.{n}_proj.weight"] for e in range(experts)] for n in ("gate", "up", "down")}
            kept[f"{p}gate_up_proj"] = torch.cat((torch.stack(parts["gate"]), torch.stack(parts["up"])), 1)
            kept[f"{p}down_proj"] = torch.stack(parts["down"])
    return kept


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1
