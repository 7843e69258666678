"""A checkpoint of tens of megabytes made in no time: random AWQ words, no numbers behind them. For memory and speed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from builders import Config, TinySpec, quantization_config, tiny_config
from safetensors.torch import save_file
from tiny_tokenizer import write_tokenizer

GROUP = 128


def packed_checkpoint(path: Path, config: Config) -> Path:
    """Write a llama checkpoint of `config` (over `tiny_config`) in AWQ gemm form; returns `path`."""
    full = tiny_config("llama", **config)
    full["quantization_config"] = quantization_config(TinySpec(quant="awq-gemm", group_size=GROUP))
    path.mkdir(parents=True)
    save_file(_tensors(full), str(path / "model.safetensors"), metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(full))
    write_tokenizer(path)
    return path


def _tensors(config: Config) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    out = {
        name: torch.randn(vocab, hidden, generator=gen).half()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    out["model.norm.weight"] = torch.ones(hidden).half()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{norm}.weight"] = torch.ones(hidden).half()
        for name, (n, k) in shapes.items():
            out[f"{prefix}{name}.qweight"] = _words(k, n // 8, gen)
            out[f"{prefix}{name}.qzeros"] = _words(k // GROUP, n // 8, gen)
            out[f"{prefix}{name}.scales"] = (torch.rand(k // GROUP, n, generator=gen) * 0.01).half()
    return out


def _words(rows: int, columns: int, gen: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32, generator=gen)
