"""Models as their publishers state them: the sizes in their `config.json`, and how many parameters they have.

Source: the model pages of the Hugging Face hub (config.json, and the parameter count of the safetensors files);
DeepSeek-V3's README_WEIGHTS.md for the count without its layer of multi-token prediction.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_YARN: Config = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_LATENT: Config = {
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": _YARN,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "moe_layer_freq": 1,
}
V2_LITE: Config = _LATENT | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
V2: Config = V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
V3: Config = _LATENT | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GROUPED: Config = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
R1_DISTILL_LLAMA_8B: Config = _GROUPED | {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
R1_DISTILL_QWEN_7B: Config = _GROUPED | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
R1_0528_QWEN3_8B: Config = _GROUPED | {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SMOLLM2_135M: Config = _GROUPED | {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
PARAMETERS: dict[str, tuple[Config, int]] = {
    "DeepSeek-V2-Lite": (V2_LITE, 15_706_484_224),
    "DeepSeek-V2": (V2, 235_741_434_880),
    "DeepSeek-V3": (V3, 671_026_419_200),
    "R1-Distill-Llama-8B": (R1_DISTILL_LLAMA_8B, 8_030_261_248),
    "R1-Distill-Qwen-7B": (R1_DISTILL_QWEN_7B, 7_615_616_512),
    "R1-0528-Qwen3-8B": (R1_0528_QWEN3_8B, 8_190_735_360),
    "SmolLM2-135M": (SMOLLM2_135M, 134_515_008),
}
"""Name to config and published number of parameters."""
