"""DeepSeek-V2 and V3 restated in numpy float64, from the papers and the model files published with the checkpoints.

Sources: DeepSeek-V2 (arXiv 2405.04434) sections 2.1, 2.2 and appendix C, DeepSeek-V3 (arXiv 2412.19437) section 2.1,
YaRN (arXiv 2309.00071), and `modeling_deepseek.py` beside the V2, V2-Lite and V3 weights. Everything is computed anew
for every call: no cache, no absorbed products, one expert after the other.

Where this differs from `transformers` 5.24, and why it is what is tested against there:
- V2 `norm_topk_prob`: `transformers` never normalises V2's weights. The published gate does when asked.
- `routed_scaling_factor`: the published V2 gate skips it when it normalises, V3's never does. It is applied always.
  No published V2 checkpoint normalises.
- `moe_layer_freq`: `transformers` gives every layer behind the dense ones experts; published code skips layers.
- `rope_interleave`: `transformers` reads it for V3 only.
- YaRN `mscale` alone: `transformers` uses it only beside `mscale_all_dim`. The published rotary embedding takes 1 for
  an absent `mscale`, 0 for an absent `mscale_all_dim`, and always the ratio of the two. Issues of other servers name
  the same ratio.
- `scoring_func`: `transformers` takes softmax for V2 and sigmoid for V3 whatever the file says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
INNER_EPS = 1e-6
"""The norms of the latent and of the low-rank queries are made without the config's epsilon in every published file."""


def logits(config: Mapping[str, Any], weights: Mapping[str, Any], ids: Sequence[int]) -> Array:
    """`[T, V]` for the text `ids`; `weights` under their names in the file, anything numpy takes."""
    model = _Model(config, weights)
    x = model["model.embed_tokens"][list(ids)]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        x = x + model.attention(f"{p}self_attn.", model.norm(f"{p}input_layernorm", x))
        x = x + model.feed_forward(i, f"{p}mlp.", model.norm(f"{p}post_attention_layernorm", x))
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return model.norm("model.norm", x) @ model[head].T


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The scaling in either spelling, None for plain rope."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = found.get("rope_type") or found.get("type")
    assert kind in (None, "default", "linear", "yarn")
    return None if kind in (None, "default") else dict(found, kind=kind)


def mscale(factor: float, weight: float) -> float:
    """YaRN's growth of attention with the stretch of the context."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def frequencies(config: Mapping[str, Any]) -> tuple[Array, float]:
    """Radians a position of each pair, and what cosines and sines are multiplied by."""
    dim, scaling = config["qk_rope_head_dim"], rope_scaling(config)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    if scaling is None:
        return plain, 1.0
    factor = scaling["factor"]
    if scaling["kind"] == "linear":
        return plain / factor, 1.0
    original = scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair(scaling.get("beta_slow", 1))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    amplitude = mscale(factor, scaling.get("mscale", 1)) / mscale(factor, scaling.get("mscale_all_dim", 0))
    return plain / factor * ramp + plain * (1 - ramp), amplitude


def softmax_scale(config: Mapping[str, Any]) -> float:
    """What scores are multiplied by before the softmax."""
    scaling = rope_scaling(config) or {}
    factor = mscale(scaling.get("factor", 1), scaling.get("mscale_all_dim", 0))
    return float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * factor**2)


def rotate(x: Array, angles: Array, amplitude: float, interleaved: bool) -> Array:
    """Turn the pairs of `x [T, H, D]` by `angles [T, D/2]`: neighbours, or elements half a head apart.

    The order of the result is of no account as long as queries and keys share it: they only meet in products.
    """
    half = x.shape[-1] // 2
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first + 1j * second) * np.exp(1j * angles)[:, None, :] * amplitude
    return np.concatenate((turned.real, turned.imag), -1)


def route(config: Mapping[str, Any], scores_in: Array, bias: Array | None) -> Array:
    """Weights `[T, E]` of the experts for router outputs `[T, E]`; zero where an expert is not chosen."""
    experts, method = scores_in.shape[1], config["topk_method"]
    if config["scoring_func"] == "softmax":
        raised = np.exp(scores_in - scores_in.max(1, keepdims=True))
        scores = raised / raised.sum(1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-scores_in))
    ranked = scores if bias is None else scores + bias
    weights = np.zeros_like(scores)
    for t in range(len(scores)):
        allowed = list(range(experts))
        if method != "greedy":
            groups = np.split(np.arange(experts), config["n_group"])
            best = 2 if method == "noaux_tc" else 1
            merit = [np.sort(ranked[t, g])[-best:].sum() for g in groups]
            order = sorted(range(len(groups)), key=lambda g: -merit[g])
            allowed = sorted(e for g in order[: config["topk_group"]] for e in groups[g])
        chosen = sorted(allowed, key=lambda e: -ranked[t, e])[: config["num_experts_per_tok"]]
        weights[t, chosen] = scores[t, chosen]
    if config["norm_topk_prob"]:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    return weights * config["routed_scaling_factor"]


@dataclass
class _Model:
    config: Mapping[str, Any]
    weights: Mapping[str, Any]

    def __getitem__(self, module: str) -> Array:
        return np.asarray(self.weights[f"{module}.weight"], dtype=np.float64)

    def norm(self, module: str, x: Array, eps: float | None = None) -> Array:
        small = self.config["rms_norm_eps"] if eps is None else eps
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + small) * self[module]

    def linear(self, module: str, x: Array) -> Array:
        bias = self.weights.get(f"{module}.bias")
        product = x @ self[module].T
        return product if bias is None else product + np.asarray(bias, dtype=np.float64)

    def attention(self, p: str, x: Array) -> Array:
        c, tokens = self.config, len(x)
        heads, nope, rank = c["num_attention_heads"], c["qk_nope_head_dim"], c["kv_lora_rank"]
        if c["q_lora_rank"] is None:
            q = self.linear(f"{p}q_proj", x)
        else:
            low = self.norm(f"{p}q_a_layernorm", self.linear(f"{p}q_a_proj", x), INNER_EPS)
            q = self.linear(f"{p}q_b_proj", low)
        q = q.reshape(tokens, heads, -1)
        both = self.linear(f"{p}kv_a_proj_with_mqa", x)
        latent = self.norm(f"{p}kv_a_layernorm", both[:, :rank], INNER_EPS)
        kv = self.linear(f"{p}kv_b_proj", latent).reshape(tokens, heads, -1)
        pairs, amplitude = frequencies(c)
        angles = np.arange(tokens)[:, None] * pairs
        interleaved = c.get("rope_interleave", True) is not False
        q_rope = rotate(q[..., nope:], angles, amplitude, interleaved)
        k_rope = rotate(both[:, None, rank:], angles, amplitude, interleaved)[:, 0]
        scores = np.einsum("thd,shd->hts", q[..., :nope], kv[..., :nope])
        scores = (scores + np.einsum("thd,sd->hts", q_rope, k_rope)) * softmax_scale(c)
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        values = np.einsum("hts,shd->thd", raised / raised.sum(-1, keepdims=True), kv[..., nope:])
        return self.linear(f"{p}o_proj", values.reshape(tokens, -1))

    def feed_forward(self, layer: int, p: str, x: Array) -> Array:
        c = self.config
        sparse = c.get("n_routed_experts") and layer >= c["first_k_dense_replace"]
        if not sparse or layer % c.get("moe_layer_freq", 1):
            return self.mlp(p, x)
        bias = self.weights.get(f"{p}gate.e_score_correction_bias")
        chosen = route(c, self.linear(f"{p}gate", x), None if bias is None else np.asarray(bias, dtype=np.float64))
        out = self.mlp(f"{p}shared_experts.", x) if c.get("n_shared_experts") else np.zeros_like(x)
        for e in range(c["n_routed_experts"]):
            out = out + chosen[:, e : e + 1] * self.mlp(f"{p}experts.{e}.", x)
        return out

    def mlp(self, p: str, x: Array) -> Array:
        gate = self.linear(f"{p}gate_proj", x)
        return self.linear(f"{p}down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{p}up_proj", x))
