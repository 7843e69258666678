"""Models of random numbers in the shapes of real ones: they time alike, and nothing has to be downloaded.

`RandomBackend` is `deepseek-quant` over a checkpoint that has no files: its tensors are drawn when they are asked for,
on the device. As a backend name it is `tests.benchmarks.gpu.random_model:RandomBackend`, with the folder that
`write_folder` made as the model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from deepseek_tgi.adapters import quantized
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.checkpoint import Checkpoint
from deepseek_tgi.adapters.model_config import read_model_config
from deepseek_tgi.adapters.module_table import Kind, module_table
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.adapters.safetensors_file import TensorEntry
from deepseek_tgi.adapters.stored_tensors import DeclaredForms

BACKEND = f"{__name__}:RandomBackend"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its published config; only the fields that decide shapes."""

    name: str
    config: dict[str, Any]

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])


def _awq(group_size: int) -> dict[str, Any]:
    return {"bits": 4, "group_size": group_size, "quant_method": "awq", "version": "gemm", "zero_point": True}


_COMMON = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float16", "tie_word_embeddings": False}
LLAMA_8B = Shape(
    "R1-Distill-Llama-8B",
    {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
        "quantization_config": _awq(128),
    },
)  # fmt: skip
QWEN_7B = Shape(
    "R1-Distill-Qwen-7B",
    {
        **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064,
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 131072, "rope_theta": 10000.0,
        "quantization_config": _awq(128),
    },
)  # fmt: skip
V2_LITE = Shape(
    "DeepSeek-V2-Lite",
    {
        **_COMMON, "rms_norm_eps": 1e-6, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "attention_bias": False,
        "max_position_embeddings": 163840, "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                         "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
        "quantization_config": _awq(64),
    },
)  # fmt: skip
SHAPES = (LLAMA_8B, QWEN_7B, V2_LITE)


def write_folder(folder: Path, shape: Shape, write_tokenizer: Callable[[Path], None], layers: int = 0) -> Path:
    """A model folder without weights; `layers` cuts the model short (0: all of them)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = shape.config | ({"num_hidden_layers": layers} if layers else {})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


class RandomCheckpoint(Checkpoint):
    """What `config.json` declares, drawn where `move` would have put it."""

    def __init__(self, folder: Path, move: Any = None) -> None:
        self.folder = folder
        self._move = None
        self._files: list[Any] = []
        self._seen: set[str] = set()
        device = torch.device("cpu") if move is None else move.device
        entries = dict(_entries(folder))
        file = SimpleNamespace(
            path=folder / "drawn", entries=entries, tensor=lambda name: _drawn(name, entries[name], device)
        )
        self._home: dict[str, Any] = dict.fromkeys(entries, file)


class RandomBackend(QuantizedModelAdapter):
    """See the module's docstring."""

    @classmethod
    def get_model(
        cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None
    ) -> QuantizedModelAdapter:
        """As `QuantizedModelAdapter`, of numbers nobody trained."""
        with mock.patch.object(quantized, "Checkpoint", RandomCheckpoint):
            return super().get_model(model_id, revision, options)


def _entries(folder: Path) -> Iterable[tuple[str, TensorEntry]]:
    config = read_model_config(folder)
    forms = DeclaredForms(config)
    for module in module_table(config):
        if module.kind is Kind.HEAD and config.tie_word_embeddings:
            continue
        for tensor in forms.form(module).tensors:
            name = f"{module.name}.{tensor.suffix}" if tensor.suffix else module.name
            yield name, TensorEntry(getattr(torch, tensor.dtype), tensor.shape, 0, tensor.num_bytes)


def _drawn(name: str, entry: TensorEntry, device: torch.device) -> torch.Tensor:
    """Codes and zeros over their whole range, norms of 1, the same for every rank that asks.

    A token's embedding is large beside what layers add to it: tokens stay unlike each other, and routers choose evenly,
    as trained ones are balanced to (layers that add much make all tokens alike, and 10 of 64 experts serve 16 of them).
    Biases of keys are far larger than what keys vary by, as the checkpoints of that family have them.
    """
    if "norm" in name:
        return torch.ones(entry.shape, dtype=entry.dtype, device=device)
    source = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    if entry.dtype == torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, entry.shape, dtype=torch.int32, device=device, generator=source)
    if name.endswith("scales"):
        return torch.rand(entry.shape, device=device, generator=source).mul_(2e-4).add_(2e-4).to(entry.dtype)
    size = 1.0 if name.endswith(("k_proj.bias", "embed_tokens.weight")) else 0.02
    return torch.randn(entry.shape, device=device, generator=source).mul_(size).to(entry.dtype)
