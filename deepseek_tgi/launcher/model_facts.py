"""What the launcher needs of a model's config.json, and the defaults TGI derives from it.

Source: TGI's launcher, `launcher/src/main.rs` (config, attention and token limits).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_tgi.adapters import hub
from deepseek_tgi.config import QUANTIZERS, LauncherConfig
from deepseek_tgi.errors import CheckpointError, ConfigError

MAX_CONFIG_BYTES = 16 * 1024 * 1024
PREFILL_TOKENS = 4096
"""TGI's value where the machine's speed is unknown, as it is for a CPU."""
FLASH_HEAD_DIMS = frozenset({64, 128, 256})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Fields of config.json; all None for a config that is not there or does not parse."""

    model_type: str | None = None
    quant_method: str | None = None
    max_position_embeddings: int | None = None
    head_dim: int | None = None
    has_vision: bool = False
    is_encoder_decoder: bool = False
    known: bool = False


def read_facts(folder: Path | None) -> ModelFacts:
    """Facts of `folder/config.json`. Whatever is wrong with it is the shard's to report: the facts are then unknown."""
    if folder is None:
        return ModelFacts()
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return ModelFacts()
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ModelFacts()
    return _facts(data) if isinstance(data, dict) else ModelFacts()


def _facts(data: dict[str, Any]) -> ModelFacts:
    quantization = data.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return ModelFacts(
        model_type=_typed(data, str, "model_type"),
        quant_method=method if method in QUANTIZERS else None,
        max_position_embeddings=_typed(data, int, "max_position_embeddings", "max_seq_len", "n_positions"),
        head_dim=_head_dim(data),
        has_vision=data.get("vision_config") is not None,
        is_encoder_decoder=data.get("is_encoder_decoder") is True,
        known=True,
    )


def _typed(data: dict[str, Any], kind: type[Any], *names: str) -> Any:
    """The first of `names` that has a value of `kind`; a positive one if a number."""
    for name in names:
        value = data.get(name)
        if isinstance(value, kind) and not isinstance(value, bool) and (kind is not int or value > 0):
            return value
    return None


def _head_dim(data: dict[str, Any]) -> int | None:
    given: int | None = _typed(data, int, "head_dim")
    hidden, heads = _typed(data, int, "hidden_size", "n_embd"), _typed(data, int, "num_attention_heads")
    if given is None and hidden and heads and hidden % heads == 0:
        return int(hidden // heads)
    return given


def cuda_major() -> int | None:
    """Major compute capability of the first NVIDIA device as its driver's own tool tells it; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(answer.split(".", maxsplit=1)[0])
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def attention_environment(
    facts: ModelFacts, has_lora: bool, capability: int | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """`ATTENTION` and `PREFIX_CACHING` as TGI's launcher exports them; what the user set is kept."""
    fallback = "paged" if capability is None or capability < 8 else "flashdecoding"
    attention, caching = fallback, "0"
    if not facts.known:
        attention, caching = "flashinfer", "true"
    elif facts.head_dim in FLASH_HEAD_DIMS:
        if has_lora:
            attention = "flashinfer"
        elif facts.model_type in {"falcon", "deepseek_v2"}:
            caching = "0" if fallback == "paged" else "true"
        else:
            attention, caching = "flashinfer", "true"
    if facts.has_vision or facts.is_encoder_decoder:
        caching = "0"
    attention = environ.get("ATTENTION") or attention
    if attention == "paged":
        caching = "0"
    return {"ATTENTION": attention, "PREFIX_CACHING": environ.get("PREFIX_CACHING") or caching}


def prefill_tokens(config: LauncherConfig, facts: ModelFacts) -> int:
    """Tokens of a prefill step: as given, else TGI's default, capped by the model's context."""
    if config.max_batch_prefill_tokens is not None:
        return config.max_batch_prefill_tokens
    return min(PREFILL_TOKENS, facts.max_position_embeddings or PREFILL_TOKENS)


def num_shards(config: LauncherConfig) -> int:
    """Number of ranks. Raises `ConfigError` if the wish contradicts itself.

    Neither flag means one rank: this backend computes on the CPU, so visible GPUs do not multiply it.
    """
    if config.num_shard is not None and config.num_shard < 1:
        raise ConfigError(f"--num-shard: got {config.num_shard}, expected at least 1")
    if config.sharded:
        if config.num_shard is None or config.num_shard <= 1:
            raise ConfigError(f"--sharded true with --num-shard {config.num_shard}: expected --num-shard 2 or more")
        return config.num_shard
    return config.num_shard or 1


def model_folder(model_id: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """Where the model lies now; None if it has to be fetched first."""
    try:
        return hub.resolve_folder(model_id, revision, environ)
    except CheckpointError:
        return None


def local_folder(model_id: str) -> Path | None:
    """The model's folder if `model_id` is one."""
    return Path(model_id) if os.path.isdir(model_id) else None
