"""Several ranks of one model as threads of this process, and checkpoints of any family to split between them.

Threads stand for processes: nothing that ranks exchange knows the difference, and a check costs no start of a process.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from builders import Config, TinySpec, encode, quantization_config, tiny_config
from safetensors.torch import save_file
from tiny_tokenizer import BOS_ID, EOS_ID, write_tokenizer

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.json_fields import Fields
from deepseek_tgi.adapters.model_config import parse_model_config
from deepseek_tgi.adapters.module_table import Kind, module_table
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

T = TypeVar("T")

V2: Config = {
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "intermediate_size": 320,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
V3: Config = V2 | {"model_type": "deepseek_v3", "q_lora_rank": 64, "n_group": 2, "topk_group": 1}
FAMILIES: dict[str, Config] = {
    "llama": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama tied": tiny_config("llama", tie_word_embeddings=True),
    "llama 9/3": tiny_config("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=288),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3", attention_bias=True),
    "deepseek_v2": V2,
    "deepseek_v2 dense": {k: v for k, v in V2.items() if k != "n_routed_experts"},
    "deepseek_v2 routed only": V2 | {"n_shared_experts": 0},
    "deepseek_v3": V3,
    "deepseek_v3 with biases": V3 | {"attention_bias": True},
}


def write_model(folder: Path, config: Config, spec: TinySpec | None = None) -> Path:
    """A checkpoint that holds exactly the tensors of the config's module table, stored as `spec` says."""
    spec = spec or TinySpec(dtype=torch.float32)
    if spec.quant is not None:
        config = config | {"quantization_config": quantization_config(spec)}
    gen = torch.Generator().manual_seed(spec.seed)
    tensors = {}
    for module in module_table(parse_model_config(Fields("config.json", config), folder)):
        shape = (module.out_features, module.in_features) if module.in_features else (module.out_features,)
        name = module.name if module.kind is Kind.VECTOR else f"{module.name}.weight"
        tensors[name] = torch.randn(*shape, generator=gen) * (1.3 / math.sqrt(shape[-1]))
        if module.kind is Kind.NORM:
            tensors[name] = torch.normal(1.0, 0.2, shape, generator=gen)
        if module.bias:
            tensors[f"{module.name}.bias"] = torch.randn(module.out_features, generator=gen) * spec.bias_scale
    stored, _ = encode(tensors, spec)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, True, None)
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def on_ranks(world_size: int, work: Callable[[int], T]) -> list[T]:
    """`work(rank)` for all ranks at once; results in rank order, or the first error."""
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, rank) for rank in range(world_size)]
        return [future.result(120) for future in futures]


def unused_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@contextmanager
def sharded(folder: Path, world_size: int = 2, **options: Any) -> Iterator[list[QuantizedModelAdapter]]:
    """The model loaded by all its ranks, closed afterwards."""
    port = unused_port()

    def load(rank: int) -> QuantizedModelAdapter:
        own = LoadOptions(rank=rank, world_size=world_size, master_port=port, **options)
        return QuantizedModelAdapter.get_model(str(folder), options=own)

    adapters = on_ranks(world_size, load)
    try:
        yield adapters
    finally:
        for adapter in adapters:
            adapter.close()
