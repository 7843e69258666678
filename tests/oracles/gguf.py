"""GGUF files written with the `gguf` package, from Hugging Face weights, the way llama.cpp's converter does.

The row permutation of llama models is restated from `convert_hf_to_gguf.py`; block formats are the package's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(weights: Array, heads: int) -> Array:
    """Rows of each head from halves to neighbouring pairs."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def gguf_name(name: str) -> str:
    """The name of a Hugging Face tensor in a GGUF file."""
    module, _, kind = name.rpartition(".")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{kind}"
    _, _, block, inner = module.split(".", 3)
    return f"blk.{block}.{BLOCK_NAMES[inner]}.{kind}"


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of GPT-2's byte alphabet, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


def add_byte_level_vocabulary(writer: gguf.GGUFWriter, pre: str, merges: list[str]) -> list[str]:
    """A vocabulary of bytes, the results of `merges` and three control tokens; returns the tokens."""
    tokens = [*byte_tokens(), *("".join(merge.split(" ")) for merge in merges), "<s>", "</s>", "<|note|>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 3) + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.USER_DEFINED]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 2)
    return tokens


def add_sentencepiece_vocabulary(writer: gguf.GGUFWriter, pieces: Mapping[str, float]) -> list[str]:
    """`<unk> <s> </s>`, the 256 byte tokens, then `pieces` with their scores; returns the tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    kinds += [gguf.TokenType.NORMAL] * len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + list(pieces.values()))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return tokens


def open_writer(path: Path, config: Mapping[str, Any]) -> gguf.GGUFWriter:
    """A writer that holds the metadata of `config` (names of a Hugging Face config)."""
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    return writer


def add_weights(
    writer: gguf.GGUFWriter,
    weights: Mapping[str, Array],
    config: Mapping[str, Any],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Add Hugging Face tensors: matrices in `kind`, vectors in float32."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in weights.items():
        module = name.split(".")[-2]
        rows = permute(values, heads[module]) if config["model_type"] == "llama" and module in heads else values
        chosen = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = rows if chosen == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(rows, chosen)
        writer.add_tensor(gguf_name(name), data, raw_dtype=chosen)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything out."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
