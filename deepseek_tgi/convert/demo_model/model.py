"""The bundled model as it is trained: DeepSeek-V3's layers, with every expert computed for every token.

At this size one matrix product over all experts, weighted by a routing matrix that is mostly zeros, takes less time on
a GPU than sorting tokens by expert. Weights that will be packed can be rounded to what the packed file holds while
gradients pass as if they were not.
Source: DeepSeek-V3 technical report, sections 2.1 (attention, experts) and 2.1.2 (load balance by a bias).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from deepseek_tgi.convert.demo_model.shape import GROUP_SIZE, ModelShape

_LEVELS = 15
_MIN_SCALE, _MAX_SCALE = 2.0**-24, 65504.0


def fake_quantise(weight: torch.Tensor, group_size: int = GROUP_SIZE) -> torch.Tensor:
    """`weight [..., K]` as `convert.rtn` rounds and reads it back; the gradient is that of the identity."""
    groups = weight.detach().unflatten(-1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0.0), groups.amax(-1, keepdim=True).clamp(min=0.0)
    steps = ((high - low) / _LEVELS).clamp(_MIN_SCALE, _MAX_SCALE).to(torch.float16).to(torch.float32)
    zeros = torch.round(-low / steps).clamp(0, _LEVELS)
    codes = (torch.round(groups / steps) + zeros).clamp(0, _LEVELS)
    return weight + (((codes - zeros) * steps).flatten(-2) - weight.detach())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm in float32, given back in the dtype of `x`."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope_table(shape: ModelShape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each `[length, rope / 2] float32`."""
    powers = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float64) / shape.qk_rope_head_dim
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) / shape.rope_theta**powers
    return angles.cos().to(torch.float32), angles.sin().to(torch.float32)


def rotate_pairs(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate neighbours `(x0, x1), (x2, x3) ...` of `x [B, heads, T, rope]`; both halves come out apart."""
    even, odd = x[..., 0::2].to(torch.float32), x[..., 1::2].to(torch.float32)
    return torch.cat((even * cosine - odd * sine, odd * cosine + even * sine), -1).to(x.dtype)


def _matrix(*sizes: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes) * (gain * sizes[-1] ** -0.5))


class Attention(nn.Module):
    """Multi-head latent attention over whole sequences."""

    def __init__(self, shape: ModelShape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.num_attention_heads
        self.q_a = _matrix(shape.q_lora_rank, shape.hidden_size)
        self.q_a_norm = nn.Parameter(torch.ones(shape.q_lora_rank))
        self.q_b = _matrix(heads * shape.qk_head_dim, shape.q_lora_rank)
        self.kv_a = _matrix(shape.kv_lora_rank + shape.qk_rope_head_dim, shape.hidden_size)
        self.kv_a_norm = nn.Parameter(torch.ones(shape.kv_lora_rank))
        self.kv_b = _matrix(heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank)
        self.o = _matrix(shape.hidden_size, heads * shape.v_head_dim, gain=gain)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], rounded: bool) -> torch.Tensor:
        """`x [B, T, H]` to `[B, T, H]`."""
        shape, heads = self.shape, self.shape.num_attention_heads
        q_a, q_b, kv_a, kv_b, out = (_seen(w, rounded) for w in (self.q_a, self.q_b, self.kv_a, self.kv_b, self.o))
        query = functional.linear(rms_norm(functional.linear(x, q_a), self.q_a_norm, shape.rms_norm_eps), q_b)
        query = query.unflatten(-1, (heads, shape.qk_head_dim)).transpose(1, 2)
        q_nope, q_rope = query.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
        latent, k_rope = functional.linear(x, kv_a).split((shape.kv_lora_rank, shape.qk_rope_head_dim), -1)
        expanded = functional.linear(rms_norm(latent, self.kv_a_norm, shape.rms_norm_eps), kv_b)
        expanded = expanded.unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, value = expanded.split((shape.qk_nope_head_dim, shape.v_head_dim), -1)
        k_rope = rotate_pairs(k_rope.unsqueeze(1), *rope).expand(-1, heads, -1, -1)
        query = torch.cat((q_nope, rotate_pairs(q_rope, *rope)), -1)
        key = torch.cat((k_nope, k_rope), -1)
        # Fused attention wants one width for all three.
        value = functional.pad(value, (0, shape.qk_head_dim - shape.v_head_dim))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return functional.linear(mixed[..., : shape.v_head_dim].transpose(1, 2).flatten(2), out)


class DenseMlp(nn.Module):
    """The feed-forward part of the leading layers."""

    def __init__(self, shape: ModelShape, gain: float) -> None:
        super().__init__()
        self.gate_up = _matrix(2, shape.intermediate_size, shape.hidden_size)
        self.down = _matrix(shape.hidden_size, shape.intermediate_size, gain=gain)

    def forward(self, x: torch.Tensor, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and no loads."""
        gate, up = functional.linear(x, _seen(self.gate_up, rounded).flatten(0, 1)).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, _seen(self.down, rounded)), x.new_zeros(0)


class Experts(nn.Module):
    """Routed experts and the shared one, which is kept as the last."""

    bias: torch.Tensor

    def __init__(self, shape: ModelShape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        count, inner = shape.n_routed_experts + 1, shape.moe_intermediate_size
        self.router = nn.Parameter(torch.randn(shape.n_routed_experts, shape.hidden_size) * shape.hidden_size**-0.5)
        self.gate_up = _matrix(count, 2, inner, shape.hidden_size)
        self.down = _matrix(count, shape.hidden_size, inner, gain=gain)
        self.register_buffer("bias", torch.zeros(shape.n_routed_experts))

    def route(self, x: torch.Tensor) -> torch.Tensor:
        """Weight of every routed expert for every token, zero where not chosen: `[..., E] float32`."""
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.to(torch.float32), self.router).sigmoid()
        with torch.no_grad():
            choice = scores + self.bias
            groups = choice.unflatten(-1, (shape.n_group, -1))
            strength = groups.topk(2, -1).values.sum(-1)
            kept = torch.zeros_like(strength).scatter_(-1, strength.topk(shape.topk_group, -1).indices, 1.0)
            choice = groups.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(-2)
            chosen = torch.zeros_like(choice).scatter_(-1, choice.topk(shape.num_experts_per_tok, -1).indices, 1.0)
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor

    def forward(self, x: torch.Tensor, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the share of the tokens that each routed expert took."""
        weights = self.route(x)
        loads = (weights.detach() > 0).to(torch.float32).flatten(0, -2).mean(0)
        weights = functional.pad(weights, (0, 1), value=1.0).to(x.dtype)
        gate_up = functional.linear(x, _seen(self.gate_up, rounded).flatten(0, 2))
        gate, up = gate_up.unflatten(-1, (-1, 2, self.shape.moe_intermediate_size)).unbind(-2)
        active = functional.silu(gate) * up * weights.unsqueeze(-1)
        down = _seen(self.down, rounded).transpose(0, 1).flatten(1)
        return functional.linear(active.flatten(-2), down), loads


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        gain = (2 * shape.num_hidden_layers) ** -0.5
        self.eps = shape.rms_norm_eps
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.attention = Attention(shape, gain)
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden_size))
        dense = index < shape.first_k_dense_replace
        self.mlp: DenseMlp | Experts = DenseMlp(shape, gain) if dense else Experts(shape, gain)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], rounded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream after this layer, and its experts' loads."""
        x = x + self.attention(rms_norm(x, self.norm, self.eps), rope, rounded)
        change, loads = self.mlp(rms_norm(x, self.mlp_norm, self.eps), rounded)
        return x + change, loads


class DemoModel(nn.Module):
    """The whole model; the embedding is the output head too."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.02)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        cosine, sine = rope_table(shape, shape.max_position_embeddings)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, ids: torch.Tensor, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[B, T, V]` of `ids [B, T]`, and the loads `[expert layers, E]`."""
        x, loads = self.stream(ids, rounded)
        return self.head(x), loads

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the stream after the last layer."""
        return functional.linear(rms_norm(x, self.norm, self.shape.rms_norm_eps), self.embedding)

    def stream(self, ids: torch.Tensor, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream `[B, T, H]` after the last layer, and the loads."""
        length = ids.shape[1]
        rope = (self.cosine[:length], self.sine[:length])
        x = functional.embedding(ids, self.embedding)
        loads = []
        for layer in self.layers:
            x, load = layer(x, rope, rounded)
            if load.numel():
                loads.append(load)
        return x, torch.stack(loads)

    @torch.no_grad()
    def balance(self, loads: torch.Tensor, rate: float) -> None:
        """Move each expert's bias by `rate` towards an even load. Shapes: `loads [expert layers, E]`."""
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        for mlp, load in zip(experts, loads, strict=True):
            mlp.bias += rate * torch.sign(load.mean() - load)


def _seen(weight: torch.Tensor, rounded: bool) -> torch.Tensor:
    return fake_quantise(weight) if rounded else weight
