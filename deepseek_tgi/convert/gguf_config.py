"""From GGUF metadata to the `config.json` of the same model, for the architectures that are implemented.

Keys are written in the 4.x spelling of `transformers`, which 5.x and TGI read as well.
Source: ggml `docs/gguf.md` (keys), llama.cpp `convert_hf_to_gguf.py` (how they were made from a config).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from deepseek_tgi.convert.gguf_file import GgufFile, Value
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture`, which is also the `model_type`, to the class name of `transformers`."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor that stands in for llama3 rope scaling, whose settings GGUF does not keep."""
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Metadata:
    """Typed access to the metadata of one file; errors name file, key, got and expected."""

    path: Path
    values: Mapping[str, Value]

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise the error for `key`."""
        value = self.values.get(key)
        got = "missing" if value is None else f"a {type(value).__name__}" if _is_long(value) else repr(value)[:80]
        raise CheckpointError(f"{self.path}: {key} is {got}; expected {expected}")

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        """An integer of at least `low`; required unless `default` is given."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            self.fail(key, f"an integer of at least {low}")
        return value

    def optional_id(self, key: str) -> int | None:
        """A token id, or None when absent."""
        return self.integer(key, low=0) if key in self.values else None

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number in the shortest spelling that its float32 has."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _FLOAT32_MAX:
            self.fail(key, "a positive number within float32")
        return _shortest(float(value))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required unless `default` is given."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self.values.get(key)
        if not isinstance(value, list):
            self.fail(key, "a list of strings")
        return value


def read_config(file: GgufFile) -> dict[str, object]:
    """The `config.json` of the model in `file`.

    Raises: `UnsupportedModelError` naming the architecture or feature, `CheckpointError` for bad metadata.
    """
    meta = Metadata(file.path, file.metadata)
    arch = meta.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: general.architecture {arch!r} is not implemented; supported are {', '.join(ARCHITECTURES)}"
        )
    if meta.integer(f"{arch}.expert_count", default=0, low=0):
        raise UnsupportedModelError(f"{file.path}: a mixture of experts ({arch}.expert_count) is not implemented")
    heads = meta.integer(f"{arch}.attention.head_count")
    width = meta.integer(f"{arch}.embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    biases = "blk.0.attn_q.bias" in file.tensors
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": width,
        "intermediate_size": meta.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": meta.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer(f"{arch}.attention.head_count_kv", default=heads),
        "head_dim": _head_dim(meta, arch, width // heads),
        "hidden_act": "silu",
        "rms_norm_eps": meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.integer(f"{arch}.context_length"),
        **_rope(file, meta, arch),
        **({} if arch == "qwen2" else {"attention_bias": biases}),
        **({"mlp_bias": "blk.0.ffn_down.bias" in file.tensors} if arch == "llama" else {}),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": meta.optional_id("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.optional_id("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.optional_id("tokenizer.ggml.padding_token_id"),
    }


def read_generation_config(file: GgufFile) -> dict[str, object]:
    """The `generation_config.json`: every id that ends a turn counts as end of sequence."""
    meta = Metadata(file.path, file.metadata)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [meta.integer(f"tokenizer.ggml.{key}", low=0) for key in keys if f"tokenizer.ggml.{key}" in file.metadata]
    result: dict[str, object] = {"eos_token_id": list(dict.fromkeys(ends))}
    for key, name in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        value = meta.optional_id(f"tokenizer.ggml.{name}")
        if value is not None:
            result[key] = value
    return result


def _head_dim(meta: Metadata, arch: str, default: int) -> int:
    size = meta.integer(f"{arch}.attention.key_length", default=default)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if meta.integer(key, default=size) != size:
            meta.fail(key, f"{size}, the size of a key head")
    return size


def _rope(file: GgufFile, meta: Metadata, arch: str) -> dict[str, object]:
    settings: dict[str, object] = {"rope_theta": meta.number(f"{arch}.rope.freq_base", default=10_000.0)}
    if ROPE_FACTORS in file.tensors:
        return {**settings, "rope_scaling": _llama3_scaling(file, meta, arch)}
    kind = meta.text(f"{arch}.rope.scaling.type", default="none")
    if kind == "none":
        return settings
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r} is not implemented; linear and yarn are")
    scaling: dict[str, object] = {"rope_type": kind, "factor": meta.number(f"{arch}.rope.scaling.factor")}
    if kind == "yarn":
        original = f"{arch}.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = meta.integer(original)
    return {**settings, "rope_scaling": scaling}


def _llama3_scaling(file: GgufFile, meta: Metadata, arch: str) -> dict[str, object]:
    """Settings whose factors are those stored: published llama3 models differ in `factor` alone."""
    stored = file.tensor(ROPE_FACTORS).flatten().tolist()
    if not all(0 < value <= _FLOAT32_MAX for value in stored):
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} holds values that are no positive numbers")
    factor = _shortest(max(stored))
    theta = meta.number(f"{arch}.rope.freq_base", default=10_000.0)
    low = _LLAMA3["original_max_position_embeddings"] / _LLAMA3["low_freq_factor"]
    high = _LLAMA3["original_max_position_embeddings"] / _LLAMA3["high_freq_factor"]
    for index, value in enumerate(stored):
        wavelength = 2 * 3.141592653589793 * theta ** (index / len(stored))
        if wavelength <= high:
            expected = 1.0
        elif wavelength >= low:
            expected = factor
        else:
            smooth = (low / wavelength - 1) / (_LLAMA3["high_freq_factor"] - _LLAMA3["low_freq_factor"])
            expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(value - expected) > 1e-3 * expected:
            raise UnsupportedModelError(
                f"{file.path}: {ROPE_FACTORS}[{index}] is {value:g}, not llama3 scaling by {factor:g} ({expected:g}); "
                "other frequency factors are not implemented"
            )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _shortest(value: float) -> float:
    """The float with the fewest digits that rounds to the same float32: 1e-05 for 9.999999747378752e-06."""
    packed = struct.pack("<f", value)
    return next(short for digits in range(1, 10) if struct.pack("<f", short := float(f"{value:.{digits}g}")) == packed)


def _is_long(value: object) -> bool:
    return not isinstance(value, (int, float, str))
