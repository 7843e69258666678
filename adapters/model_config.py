"""Typed, checked reading of a checkpoint's `config.json`, which refuses what is not implemented.

A family is one reader in `FAMILIES` that turns the file into an attention part and an MLP part; the rest of
`ModelConfig` is common. A family with another kind of attention or MLP adds a part class and a reader, and nothing else
here changes. Sizes that decide tensor shapes are required: a missing one is an error, never upstream's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deepseek_tgi.adapters.deepseek_config import published_yarn, read_deepseek
from deepseek_tgi.adapters.json_fields import Fields, read_json, shown
from deepseek_tgi.adapters.part_specs import (
    Attention,
    GatedMlp,
    GroupedQueryAttention,
    LatentAttention,
    MixtureOfExperts,
)
from deepseek_tgi.adapters.quant_settings import QuantSettings, read_quant_settings
from deepseek_tgi.adapters.rope_config import RopeConfig, RopeKind, read_rope
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "FAMILIES",
    "Attention",
    "GatedMlp",
    "GroupedQueryAttention",
    "LatentAttention",
    "MixtureOfExperts",
    "ModelConfig",
    "RopeConfig",
    "RopeKind",
    "parse_model_config",
    "read_json",
    "read_model_config",
]

_DTYPES = frozenset({"float32", "float16", "bfloat16"})
_MISSING = {
    "deepseek_v32": "sparse attention (the indexer that picks the tokens to attend to)",
    "deepseek_v4": "compressed attention and hyper-connections",
}
"""Families known by name, and what they need that is not here."""
_SILU = frozenset({"silu", "swish"})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model is, from `config.json` alone; no tensor has been looked at.

    `dtype` is the stored name or None; `quantization` is what the file declares, already refused if it cannot be read.
    `folder` is where the checkpoint lies. `experts` is None for a dense model; `num_extra_layers` are stored behind the
    model's own layers to predict further tokens and are not loaded.
    """

    folder: Path
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention: Attention
    mlp: GatedMlp
    experts: MixtureOfExperts | None
    num_extra_layers: int
    rope: RopeConfig
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    quantization: QuantSettings

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        spec = self.attention
        return spec.qk_rope_head_dim if isinstance(spec, LatentAttention) else spec.head_dim

    def with_rope(self, kind: str, factor: float) -> ModelConfig:
        """The config under TGI's rope overrides."""
        return replace(self, rope=self.rope.rescaled(kind, factor, self.max_position_embeddings))


def read_model_config(folder: Path) -> ModelConfig:
    """Read and check `folder/config.json`.

    Raises: `CheckpointError` (file, key, got, expected), `UnsupportedModelError` (named, with what is supported).
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder; expected a checkpoint folder with config.json")
    path = folder / "config.json"
    return parse_model_config(Fields(str(path), read_json(path)), folder)


def parse_model_config(fields: Fields, folder: Path) -> ModelConfig:
    """Build the checked config from an already parsed `config.json`."""
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        note = f": it needs {_MISSING[model_type]}" if model_type in _MISSING else ""
        raise UnsupportedModelError(
            f"{fields.source}: model_type {shown(repr(model_type))} is not implemented{note}; supported are "
            f"{', '.join(FAMILIES)}"
        )
    activation = fields.text("hidden_act", default="silu")
    if activation not in _SILU:
        raise UnsupportedModelError(
            f"{fields.source}: hidden_act is {shown(repr(activation))}; only silu is implemented"
        )
    attention, mlp, experts = FAMILIES[model_type](fields)
    max_positions = fields.integer("max_position_embeddings")
    rope = read_rope(fields, max_positions)
    quantization = fields.section("quantization_config") or fields.section("compression_config")
    return ModelConfig(
        folder=folder,
        model_type=model_type,
        hidden_size=_hidden_size(fields),
        num_hidden_layers=_num_layers(fields),
        vocab_size=fields.integer("vocab_size", high=2**24),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention=attention,
        mlp=mlp,
        experts=experts,
        num_extra_layers=fields.integer("num_nextn_predict_layers", default=0, low=0, high=64),
        rope=published_yarn(rope, fields) if isinstance(attention, LatentAttention) else rope,
        dtype=_read_dtype(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
        pad_token_id=next(iter(fields.token_ids("pad_token_id")), None),
        quantization=read_quant_settings(folder, None if quantization is None else quantization.data),
    )


def _hidden_size(fields: Fields) -> int:
    return fields.integer("hidden_size", high=2**20)


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", high=4096)


def _read_dtype(fields: Fields) -> str | None:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(key):
        return None
    name = fields.text(key).removeprefix("torch.")
    if name == "auto":
        return None
    if name not in _DTYPES:
        fields.fail(key, f"one of {', '.join(sorted(_DTYPES))}")
    return name


def _read_attention(
    fields: Fields, qkv_bias: bool, output_bias: bool, qk_norm: bool = False, head_dim_default: int = 0
) -> GroupedQueryAttention:
    heads = fields.integer("num_attention_heads", high=2**16)
    kv_heads = fields.integer("num_key_value_heads", default=heads, high=2**16)
    if heads % kv_heads:
        fields.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    derived = not head_dim_default and not fields.has("head_dim")
    if derived and _hidden_size(fields) % heads:
        fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads}), since head_dim is not given")
    head_dim = fields.integer("head_dim", default=head_dim_default or _hidden_size(fields) // heads, high=2**16)
    if head_dim % 2:
        fields.fail("hidden_size" if derived else "head_dim", f"an even head size for rotary positions, not {head_dim}")
    return GroupedQueryAttention(heads, kv_heads, head_dim, qkv_bias, output_bias, qk_norm)


def _read_mlp(fields: Fields, bias: bool = False) -> GatedMlp:
    return GatedMlp(fields.integer("intermediate_size", high=2**24), bias)


def _refuse_sliding_window(fields: Fields) -> None:
    """Qwen files carry window settings that are switched off; only an active window is refused."""
    layer_types = fields.texts("layer_types")
    if layer_types:
        windowed = any(kind != "full_attention" for kind in layer_types)
    else:
        first = fields.integer("max_window_layers", default=28, low=0)
        switched_on = fields.flag("use_sliding_window", default=False)
        windowed = switched_on and fields.has("sliding_window") and first < _num_layers(fields)
    within = fields.has("sliding_window") and fields.integer("sliding_window") >= fields.integer(
        "max_position_embeddings"
    )
    if windowed and not within:
        raise UnsupportedModelError(
            f"{fields.source}: sliding-window attention is active (layer_types or use_sliding_window, sliding_window "
            f"{shown(repr(fields.data.get('sliding_window')))}) and is not implemented; full attention is"
        )


Parts = tuple[Attention, GatedMlp, MixtureOfExperts | None]


def _read_llama(fields: Fields) -> Parts:
    bias = fields.flag("attention_bias", default=False)
    return _read_attention(fields, bias, bias), _read_mlp(fields, fields.flag("mlp_bias", default=False)), None


def _read_qwen2(fields: Fields) -> Parts:
    _refuse_sliding_window(fields)
    return _read_attention(fields, qkv_bias=True, output_bias=False), _read_mlp(fields), None


def _read_qwen3(fields: Fields) -> Parts:
    _refuse_sliding_window(fields)
    bias = fields.flag("attention_bias", default=False)
    # Upstream's qwen3 does not derive a head size that is not given: it is 128.
    return _read_attention(fields, bias, bias, qk_norm=True, head_dim_default=128), _read_mlp(fields), None


FAMILIES: Mapping[str, Callable[[Fields], Parts]] = {
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "deepseek_v2": lambda fields: read_deepseek(fields, 2),
    "deepseek_v3": lambda fields: read_deepseek(fields, 3),
}
"""Reader of the parts of each implemented `model_type`."""
