"""A tiny qwen2 whose keys have a huge constant part, and text that it predicts: what a low-bit cache breaks first.

Imported by tests as `key_bias` and by benchmarks as `tests.key_bias`. As in the published models, the bias sits where
rotation hardly turns: it shifts all scores of a query alike, so the model does not notice it and a coarse cache does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import KVMode
from deepseek_tgi.kv.pool import KVPool

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 256, 384, 4, 2, 64, 320
BIAS = 200.0
"""Beside elements of size 1: about what Qwen2.5 has."""
WIDTHS = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def write_checkpoint(folder: Path) -> Path:
    """The model without a tokenizer, in float32."""
    gen = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=gen),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN, generator=gen) * (2.0 / math.sqrt(HIDDEN)),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, (n, k) in WIDTHS.items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(n, k, generator=gen) * (1.3 / math.sqrt(k))
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{prefix}self_attn.{name}.bias"] = torch.randn(WIDTHS[f"self_attn.{name}"][0], generator=gen)
        # The last pair of each head turns once in millions of positions.
        keys = tensors[f"{prefix}self_attn.k_proj.bias"].view(KV_HEADS, DIM)
        keys[:, DIM // 2 - 1], keys[:, DIM - 1] = BIAS, -BIAS
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()))
    save_file(tensors, folder / "model.safetensors")
    return folder


def config() -> dict[str, object]:
    """Its `config.json`."""
    return {
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@torch.no_grad()
def own_text(adapter: ModelAdapter, sequences: int = 16, length: int = 256, seed: int = 0) -> list[list[int]]:
    """What the model itself says, drawn over an exact cache: text whose loss is as low as this model can have it."""
    gen = torch.Generator().manual_seed(seed)
    layout = adapter.kv_layout.with_mode(KVMode.FLOAT32)
    columns = -(-length // layout.block_size)
    pool = KVPool(layout, sequences * columns)
    tables = torch.arange(sequences * columns, dtype=torch.int32).view(sequences, columns)
    said = torch.randint(2, adapter.info.vocab_size, (sequences, 1), generator=gen)
    for at in range(length - 1):
        place = torch.full((sequences,), at, dtype=torch.int32)
        slots = tables[:, at // layout.block_size].long() * layout.block_size + at % layout.block_size
        inputs = ForwardInputs(
            said[:, -1].contiguous(), place, slots, torch.arange(sequences + 1, dtype=torch.int32), tables, place,
            torch.arange(sequences), 1, at + 1,
        )  # fmt: skip
        chances = adapter.step(inputs, pool).softmax(-1)
        said = torch.cat((said, torch.multinomial(chances, 1, generator=gen)), 1)
    pool.close()
    return said.tolist()
