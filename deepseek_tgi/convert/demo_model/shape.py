"""The sizes of the bundled model, and the `config.json` that says them."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_SIZE = 32
"""Weights a scale of the packed layers; divides every input side below."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A DeepSeek-V3 model; field names as in `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 96
    num_hidden_layers: int = 10
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.0
    first_k_dense_replace: int = 1
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def config(self, bos_id: int, eos_id: int) -> dict[str, object]:
        """`config.json` in the spelling that DeepSeek's own checkpoints use."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **own,
            "num_key_value_heads": self.num_attention_heads,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_interleave": True,
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
        }
