"""A tiny random checkpoint to check a backend with when no model is given.

It is built to be told apart from a wrong answer: no pad token, two EOS ids that only `generation_config.json` knows, a
vocabulary wider than the tokenizer's, and head rows in a fixed linear relation (`HEAD_RELATIONS`) that raw logits keep
and a softmax, a shift or a penalty breaks.
"""

from __future__ import annotations

import ctypes
import json
import math
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepseek_tgi.adapters.awq.unpack import pack_gemm
from deepseek_tgi.adapters.weight_forms import Int4Weight

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB, GROUP = 128, 256, 2, 4, 2, 320, 64
BOS, EOS, END_OF_TURN = 256, 257, 258
EOS_IDS = frozenset({EOS, END_OF_TURN})
_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
HEAD_RELATIONS = ((300, 301, -1.0), (302, 303, 2.0))
"""`(a, b, factor)`: row a of the output head is `factor` times row b."""


def write_tiny_checkpoint(folder: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write a two-layer llama checkpoint, AWQ gemm inside and `dtype` outside, into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(dtype))
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": sorted(EOS_IDS)})
    _write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False})
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write_safetensors(folder / "model.safetensors", _tensors(dtype, seed))
    return folder


def _config(dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
    }


def _tokenizer() -> Tokenizer:
    """One token a byte, then the specials; nothing is added around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|end|>")])
    return tokenizer


def _tensors(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * spread

    head = normal(VOCAB, HIDDEN, spread=2 / math.sqrt(HIDDEN)).to(dtype)
    for row, source, factor in HEAD_RELATIONS:
        head[row] = head[source] * factor
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, spread=1.0).to(dtype),
        "model.norm.weight": (1 + normal(HIDDEN, spread=0.2)).to(dtype),
        "lm_head.weight": head,
    }
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = (1 + normal(HIDDEN, spread=0.2)).to(dtype)
        for name, n, k in (
            *(("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", kv_width, HIDDEN)),
            *(("self_attn.v_proj", kv_width, HIDDEN), ("self_attn.o_proj", HIDDEN, HIDDEN)),
            *(("mlp.gate_proj", INNER, HIDDEN), ("mlp.up_proj", INNER, HIDDEN), ("mlp.down_proj", HIDDEN, INNER)),
        ):
            for suffix, tensor in pack_gemm(_random_int4(n, k, generator)).items():
                tensors[f"{prefix}{name}.{suffix}"] = tensor
    return tensors


def _random_int4(n: int, k: int, generator: torch.Generator) -> Int4Weight:
    """Weights of spread about `1.3 / sqrt(k)`: smaller ones would leave attention flat and hide mistakes."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(6, 10, (n, k // GROUP), dtype=torch.uint8, generator=generator)
    width = 1.3 / math.sqrt(k) / 4.6  # 4.6 is the spread of codes drawn evenly from 0..15
    scales = (0.8 + 0.4 * torch.rand(n, k // GROUP, generator=generator)) * width
    return Int4Weight(codes, zeros, scales.to(torch.float16), GROUP)


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Choice: by hand. `safetensors.torch.save_file` imports numpy, which is no runtime dependency.

    Source: https://github.com/huggingface/safetensors#format
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    position = 0
    for name, tensor in tensors.items():
        stored = tensor.contiguous()
        parts.append(ctypes.string_at(stored.data_ptr(), stored.nbytes))
        end = position + stored.nbytes
        table[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [position, end]}
        position = end
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(parts))


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
