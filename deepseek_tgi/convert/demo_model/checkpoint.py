"""Between the training model and a Hugging Face checkpoint folder of the `deepseek_v3` architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deepseek_tgi.convert.demo_model.model import Attention, DemoModel, DenseMlp, Experts, Layer
from deepseek_tgi.convert.demo_model.shape import ModelShape

_SHARD_BYTES = 12 << 20


def named_tensors(model: DemoModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The published name and the values (a view) of every tensor."""
    yield "model.embed_tokens.weight", model.embedding.data
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        for name, values in _layer_tensors(layer):
            yield f"model.layers.{index}.{name}", values
    yield "model.norm.weight", model.norm.data


def _layer_tensors(layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    yield "input_layernorm.weight", layer.norm.data
    yield from _attention_tensors(layer.attention)
    yield "post_attention_layernorm.weight", layer.mlp_norm.data
    if isinstance(layer.mlp, DenseMlp):
        yield from _mlp_tensors("mlp", layer.mlp.gate_up.data, layer.mlp.down.data)
        return
    experts: Experts = layer.mlp
    yield "mlp.gate.weight", experts.router.data
    yield "mlp.gate.e_score_correction_bias", experts.bias
    last = experts.gate_up.shape[0] - 1
    for index in range(last + 1):
        prefix = "mlp.shared_experts" if index == last else f"mlp.experts.{index}"
        yield from _mlp_tensors(prefix, experts.gate_up.data[index], experts.down.data[index])


def _attention_tensors(attention: Attention) -> Iterator[tuple[str, torch.Tensor]]:
    yield "self_attn.q_a_proj.weight", attention.q_a.data
    yield "self_attn.q_a_layernorm.weight", attention.q_a_norm.data
    yield "self_attn.q_b_proj.weight", attention.q_b.data
    yield "self_attn.kv_a_proj_with_mqa.weight", attention.kv_a.data
    yield "self_attn.kv_a_layernorm.weight", attention.kv_a_norm.data
    yield "self_attn.kv_b_proj.weight", attention.kv_b.data
    yield "self_attn.o_proj.weight", attention.o.data


def _mlp_tensors(prefix: str, gate_up: torch.Tensor, down: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}.gate_proj.weight", gate_up[0]
    yield f"{prefix}.up_proj.weight", gate_up[1]
    yield f"{prefix}.down_proj.weight", down


def save(model: DemoModel, folder: Path, bos_id: int, eos_id: int) -> None:
    """Write config and weights; float16 but for the correction biases, which the family keeps in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = _SHARD_BYTES
    for name, values in named_tensors(model):
        wide = name.endswith("e_score_correction_bias")
        stored = values.detach().to(torch.float32 if wide else torch.float16, copy=True).contiguous().cpu()
        if stored.nbytes > room:
            shards.append({})
            room = _SHARD_BYTES
        shards[-1][name] = stored
        room -= stored.nbytes
    places = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(shard, file))
    total = sum(values.nbytes for shard in shards for values in shard.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index_text + "\n", encoding="utf-8")
    config = {**model.shape.config(bos_id, eos_id), "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: Path) -> DemoModel:
    """The training model of a folder that `save` wrote."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = DemoModel(ModelShape(**{name: config[name] for name in ModelShape.__dataclass_fields__}))
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            stored.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    for name, values in named_tensors(model):
        values.copy_(stored[name])
    return model
