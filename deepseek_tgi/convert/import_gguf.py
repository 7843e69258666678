"""From a GGUF file to a Hugging Face checkpoint folder.

Choice: weights become float16, or bfloat16 where the file itself stores bfloat16. Block formats carry float16 scales,
so float16 keeps three more bits of each dequantised value than bfloat16 would; a value that leaves float16's range is
refused by name. Rejected: float32, twice the size for digits the source never had.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from deepseek_tgi.convert.gguf_config import ROPE_FACTORS, read_config, read_generation_config
from deepseek_tgi.convert.gguf_file import GgufFile, GgufTensor
from deepseek_tgi.convert.gguf_tokenizer import read_tokenizer
from deepseek_tgi.convert.output_folder import new_folder, write_json
from deepseek_tgi.convert.progress import progress_bar
from deepseek_tgi.convert.safetensors_writer import PlannedTensor, SafetensorsWriter
from deepseek_tgi.errors import CheckpointError

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER_NAME = re.compile(r"(\w+)\.(weight|bias)")


def import_gguf(src: Path, out: Path, progress: bool = False) -> None:
    """Write the model in the GGUF file `src` as a checkpoint folder `out`, one tensor at a time.

    Raises: `CheckpointError` or `UnsupportedModelError` for what cannot be read, `ConfigError` if `out` exists,
    `ResourceError` if the disk is full. On any error nothing is left behind.
    """
    file = GgufFile(src)
    config = read_config(file)
    tokenizer, tokenizer_config = read_tokenizer(file)
    stored_bf16 = any(entry.kind.name == "BF16" for entry in file.tensors.values())
    dtype = torch.bfloat16 if stored_bf16 else torch.float16
    names = dict(_new_names(file))
    with new_folder(out) as folder:
        write_json(folder / "config.json", {**config, "torch_dtype": str(dtype).removeprefix("torch.")})
        write_json(folder / "generation_config.json", read_generation_config(file))
        write_json(folder / "tokenizer.json", tokenizer, indent=None)
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        plan = [PlannedTensor(new, dtype, file.tensors[old].shape) for old, new in names.items()]
        with SafetensorsWriter(folder / "model.safetensors", plan) as writer:
            for old in progress_bar(names, "importing", progress):
                writer.write(_convert(file, file.tensors[old], dtype, _permuted_heads(config, old)))
                file.release()


def _new_names(file: GgufFile) -> Iterator[tuple[str, str]]:
    """Old and new name of every tensor, in file order."""
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        block, outer = _BLOCK_NAME.fullmatch(name), _OUTER_NAME.fullmatch(name)
        if block and block[2] in _INNER:
            yield name, f"model.layers.{block[1]}.{_INNER[block[2]]}.{block[3]}"
        elif outer and outer[1] in _OUTER:
            yield name, f"{_OUTER[outer[1]]}.{outer[2]}"
        else:
            raise CheckpointError(f"{file.path}: tensor {name} has no place in this architecture")


def _permuted_heads(config: dict[str, object], name: str) -> int:
    """Number of heads whose rows the file holds in pair order, or 0.

    GGUF files of llama models interleave the two halves of each query and key head (llama.cpp rotates neighbours).
    """
    kinds = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in kinds:
        return 0
    heads = config[kinds[part]]
    assert isinstance(heads, int)
    return heads


def _convert(file: GgufFile, entry: GgufTensor, dtype: torch.dtype, heads: int) -> torch.Tensor:
    values = file.tensor(entry.name, dtype)
    # One pass: a sum is finite exactly if all its terms are. float32 has room for any sum of float16 values, and of
    # bfloat16 values as far as weights go.
    if not torch.isfinite(values.sum(dtype=torch.float32)):
        name = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{file.path}: tensor {entry.name} holds infinities, NaN or values beyond {name}")
    if not heads:
        return values
    rows = entry.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{file.path}: tensor {entry.name} has {rows} rows; expected a multiple of {2 * heads}")
    return values.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(entry.shape)
