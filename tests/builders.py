"""Tiny random checkpoints in every format the product reads, with the numbers they stand for.

The dequantised weights are computed here in plain torch from the codes drawn, never read back from the files, so
`TinyCheckpoint.reference()` (the `transformers` model with those weights) is an oracle independent of the product.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import format_writers
import torch
from deepseek_checkpoint import ARCHITECTURES as DEEPSEEK
from deepseek_checkpoint import as_transformers, deepseek_fields, deepseek_weights
from oracles.awq import Layer, gemm_tensors, gemv_tensors, pack_quantized_tensors
from safetensors.torch import save_file
from tiny_tokenizer import BOS_ID, EOS_ID, IM_END_ID, write_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"} | DEEPSEEK
LINEAR = ("_proj", "_proj_with_mqa")
"""How the names of modules end that quantising tools convert; a router's `gate` and the head they leave alone."""
Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TinySpec:
    """What to write. `quant` is None, `awq-gemm`, `awq-gemv`, `compressed-tensors` or one of `format_writers.FORMATS`.

    `not_converted` goes into the config as it is; `dense_modules` are the suffixes really stored dense (default: the
    same names). `head` says what a tied checkpoint stores besides: None, `equal` or `differs`. `ordered`: GPTQ groups
    in activation order; `block`: of 8-bit floats.
    """

    quant: str | None = None
    group_size: int = 32
    zero_point: bool = True
    scale_dtype: torch.dtype = torch.float16
    dtype: torch.dtype = torch.float16
    shards: int = 1
    not_converted: list[str] | None = None
    dense_modules: tuple[str, ...] | None = None
    head: str | None = None
    bias_scale: float = 1.0
    add_bos: bool = True
    pad_token: str | None = None
    seed: int = 0
    ordered: bool = False
    block: tuple[int, int] = (128, 128)
    config: Config = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A written checkpoint: its folder, its config, and the dequantised float32 state dict under HF names."""

    path: Path
    config: Config
    dense: Tensors

    def reference(self) -> Any:
        """The `transformers` model with the same weights, float32, eager attention."""
        from transformers import AutoConfig, AutoModelForCausalLM

        plain = {k: v for k, v in self.config.items() if k not in ("quantization_config", "torch_dtype")}
        config = AutoConfig.for_model(**json.loads(json.dumps(plain)))
        config._attn_implementation = "eager"
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(config, dtype=torch.float32).eval()
        mine = as_transformers(self.config, self.dense) if self.config["model_type"] in DEEPSEEK else self.dense
        mine = {k: v for k, v in mine.items() if k != "lm_head.weight" or not config.tie_word_embeddings}
        missing, unexpected = model.load_state_dict(mine, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing
        return model


def tiny_config(family: str, **over: Any) -> Config:
    """`config.json` of a two-layer model: grouped heads, MLP of 3 groups of 128, spare vocabulary rows."""
    config: Config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 320,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float16",
    }
    if family == "qwen3":
        config["head_dim"] = 64  # not hidden_size / heads, as in the published models
    if family in DEEPSEEK:
        config |= deepseek_fields(family)
    return config | over


def tiny_checkpoint(path: Path, family: str = "llama", quant: str | None = None, **spec: Any) -> TinyCheckpoint:
    """Write a complete checkpoint into `path`; further keywords are the fields of `TinySpec`."""
    s = TinySpec(quant=quant, **spec)
    config = tiny_config(family, **s.config)
    config["torch_dtype"] = str(s.dtype).removeprefix("torch.")
    if quant is not None:
        config["quantization_config"] = quantization_config(s)
    weights = random_weights(config, s)
    stored, dense = encode(weights, s)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(path, s.add_bos, s.pad_token)
    write_shards(path, stored, s.shards)
    return TinyCheckpoint(path, config, dense)


def quantization_config(s: TinySpec) -> Config:
    """The `quantization_config` the tools that write each format put into `config.json`."""
    if s.quant in format_writers.GPTQ:
        return format_writers.gptq_config(s.quant, _grouping(s), {})
    if s.quant in format_writers.FP8:
        return format_writers.fp8_config(s.quant, s.block, s.not_converted)
    if s.quant == "ct-ordered":
        config = quantization_config(replace(s, quant="compressed-tensors"))
        config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        return config
    if s.quant == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "symmetric": not s.zero_point, "dynamic": False}
        weights |= {"strategy": "channel"} if s.group_size == -1 else {"strategy": "group", "group_size": s.group_size}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *(s.not_converted or [])],
        }
    assert s.quant in ("awq-gemm", "awq-gemv")
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": s.group_size,
        "zero_point": s.zero_point,
        "version": s.quant.removeprefix("awq-"),
        "modules_to_not_convert": s.not_converted,
    }


def random_weights(config: Config, s: TinySpec) -> Tensors:
    """Float32 weights under HF names, scaled so that every part is seen in the logits.

    At the usual initial spread of 0.02 attention is nearly uniform and the residual stream is the embedding alone: a
    wrong rope or a lost bias would not show. Here scores, MLP and residual all have spread of about one.
    """
    if config["model_type"] in DEEPSEEK:
        return deepseek_weights(config, s.seed, s.bias_scale)
    gen = torch.Generator().manual_seed(s.seed)
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads

    def linear(n: int, k: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(n, k, generator=gen) * (gain / math.sqrt(k))

    def near_one(n: int) -> torch.Tensor:
        return torch.normal(1.0, 0.2, (n,), generator=gen)

    def bias(n: int, scale: float) -> torch.Tensor:
        return torch.linspace(-scale, scale, n).index_select(0, torch.randperm(n, generator=gen))

    spread = 0.2 if config["tie_word_embeddings"] else 1.0  # as a head, the table must not saturate the softmax
    w = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=gen) * spread}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            w[f"{p}self_attn.{name}_proj.weight"] = linear(n * dim, hidden, 1.0 if name == "v" else 1.3)
            if family == "qwen2" or config.get("attention_bias"):
                w[f"{p}self_attn.{name}_proj.bias"] = bias(n * dim, s.bias_scale)
        w[f"{p}self_attn.o_proj.weight"] = linear(hidden, heads * dim)
        if config.get("attention_bias"):
            w[f"{p}self_attn.o_proj.bias"] = bias(hidden, s.bias_scale)
        for name, n, k in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            w[f"{p}mlp.{name}_proj.weight"] = linear(n, k, 1.4)
            if config.get("mlp_bias"):
                w[f"{p}mlp.{name}_proj.bias"] = bias(n, s.bias_scale)
        if family == "qwen3":
            w[f"{p}self_attn.q_norm.weight"] = near_one(dim)
            w[f"{p}self_attn.k_norm.weight"] = near_one(dim)
        w[f"{p}input_layernorm.weight"] = near_one(hidden)
        w[f"{p}post_attention_layernorm.weight"] = near_one(hidden)
    w["model.norm.weight"] = near_one(hidden)
    if not config["tie_word_embeddings"]:
        w["lm_head.weight"] = linear(config["vocab_size"], hidden, 2.0)
    elif s.head is not None:
        w["lm_head.weight"] = w["model.embed_tokens.weight"] * (1.0 if s.head == "equal" else 2.0)
    return w


def encode(weights: Tensors, s: TinySpec) -> tuple[Tensors, Tensors]:
    """The tensors as stored, and the float32 values they stand for."""
    stored: Tensors = {}
    dense: Tensors = {}
    kept = tuple(s.dense_modules if s.dense_modules is not None else s.not_converted or ())
    for name, value in weights.items():
        module = name.removesuffix(".weight")
        if s.quant is None or not module.endswith(LINEAR) or any(f".{module}.".find(f".{d}.") >= 0 for d in kept):
            stored[name] = value.to(s.dtype)
            dense[name] = stored[name].float()
            continue
        if s.quant in format_writers.FORMATS:
            tensors, dense[name] = _encode_more(module, value, s)
            stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
            continue
        codes, zeros, scales = round_to_nearest(value, s)
        group = value.shape[1] if s.group_size == -1 else s.group_size
        wide = zeros.float().repeat_interleave(group, 1)
        dense[name] = (codes.float() - wide) * scales.float().repeat_interleave(group, 1)
        for suffix, tensor in pack(codes, zeros, scales, s).items():
            stored[f"{module}.{suffix}"] = tensor
    return stored, dense


def _grouping(s: TinySpec) -> format_writers.Grouping:
    return format_writers.Grouping(s.group_size, s.zero_point, s.ordered or s.quant == "ct-ordered")


def _encode_more(module: str, value: torch.Tensor, s: TinySpec) -> tuple[Tensors, torch.Tensor]:
    assert s.quant is not None, "only called for a format"
    if s.quant in format_writers.FP8:
        return format_writers.write_fp8(value, s.quant, s.block)
    if s.quant == "ct-ordered":
        return format_writers.write_ordered_pack(module, value, _grouping(s))
    return format_writers.write_gptq(module, value, s.quant, _grouping(s))


def round_to_nearest(weight: torch.Tensor, s: TinySpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], zeros uint8 [N, K/g] and scales [N, K/g] in `s.scale_dtype` of a float weight [N, K]."""
    n, k = weight.shape
    group = k if s.group_size == -1 else s.group_size
    assert k % group == 0, f"{k} input features are not whole groups of {group}"
    w = weight.view(n, k // group, group)
    if s.zero_point:
        low, high = w.amin(2).clamp(max=0), w.amax(2).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-5).to(s.scale_dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (w.abs().amax(2) / 7.5).clamp(min=1e-5).to(s.scale_dtype)
        zeros = torch.full((n, k // group), 8.0)
    codes = (w / scales.float()[..., None]).round().add(zeros[..., None]).clamp(0, 15)
    return codes.view(n, k).to(torch.uint8), zeros.to(torch.uint8), scales


def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, s: TinySpec) -> Tensors:
    """Tensors of one linear layer as the format of `s` stores them."""
    # The oracle moves scales about without reading them, so their bits stand in for bfloat16, which numpy lacks.
    bits: Any = scales.view(torch.int16 if scales.element_size() == 2 else torch.int32).numpy()
    layer = Layer(codes.long().numpy(), zeros.long().numpy(), bits, codes.shape[1] // zeros.shape[1])
    if s.quant == "compressed-tensors":
        arrays = pack_quantized_tensors(layer, symmetric=not s.zero_point)
    else:
        arrays = gemm_tensors(layer) if s.quant == "awq-gemm" else gemv_tensors(layer)
        if not s.zero_point:
            del arrays["qzeros"]
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    return {n: t.view(scales.dtype) if n in ("scales", "weight_scale") else t for n, t in tensors.items()}


def write_shards(path: Path, tensors: Tensors, shards: int) -> None:
    """One `model.safetensors`, or several files with an index; tensors are dealt out in turn."""
    names = list(tensors)
    if shards == 1:
        save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = {n: tensors[n] for n in names[i::shards]}
        save_file(mine, str(path / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
