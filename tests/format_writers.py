"""Writers of GPTQ, 8-bit float and activation-ordered formats for `builders`: what is stored, and what it stands for.

Each takes one float weight `[N, K]` and gives the tensors of the module with the float32 weight that they mean, worked
out by the oracles from the numbers drawn, never read back.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from oracles import fp8 as fp8_oracle
from oracles.gptq import GptqLayer, gptq_tensors, natural_groups, sorted_groups

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
GPTQ = ("gptq", "gptq_v2")
FP8 = ("fp8", "fp8-ue8m0", "fp8-e8m0", "fp8-row", "ct-fp8")
FORMATS = (*GPTQ, *FP8, "ct-ordered")
"""`fp8-ue8m0` has powers of two stored as float32, `fp8-e8m0` as bare exponents; `fp8-row` one scale a row."""
_INPUT_OF = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "kv_a_proj_with_mqa": "q_a_proj"}
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Grouping:
    """How 4-bit groups are made: `size` inputs each (-1: all), with a zero of their own, in activation order or not."""

    size: int
    zero_point: bool
    ordered: bool


def gptq_config(quant: str, grouping: Grouping, lists: Config) -> Config:
    """As GPTQModel writes it, `checkpoint_format` included."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": grouping.size,
        "sym": not grouping.zero_point,
        "desc_act": grouping.ordered,
        "static_groups": False,
        "true_sequential": True,
        "damp_percent": 0.05,
        "lm_head": False,
        "checkpoint_format": quant,
        **lists,
    }


def fp8_config(quant: str, block: tuple[int, int], ignored: list[str] | None) -> Config:
    """As DeepSeek (and for `ct-fp8`, llm-compressor) writes it."""
    if quant == "ct-fp8":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [*block]}
        activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        config: Config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head", *(ignored or [])]}
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if quant != "fp8-row":
        config["weight_block_size"] = [*block]
    if quant in ("fp8-ue8m0", "fp8-e8m0"):
        config["scale_fmt"] = "ue8m0"
    return config | ({} if ignored is None else {"modules_to_not_convert": ignored})


def write_gptq(module: str, weight: torch.Tensor, quant: str, grouping: Grouping) -> tuple[Tensors, torch.Tensor]:
    """Tensors of `module` in `gptq` or `gptq_v2`, and the weight they stand for."""
    layer = _round(module, weight, grouping)
    arrays = gptq_tensors(layer, 2 if quant == "gptq_v2" else 1)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return tensors, torch.from_numpy(layer.weight())


def write_ordered_pack(module: str, weight: torch.Tensor, grouping: Grouping) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors' pack-quantized with `actorder: group`: codes in file order, `weight_g_idx` beside them."""
    layer = _round(module, weight, grouping)
    packed = gptq_tensors(layer, 2)
    tensors = {
        "weight_packed": packed["qweight"].T,
        "weight_scale": packed["scales"].T,
        "weight_shape": np.array(weight.shape),
        "weight_g_idx": packed["g_idx"],
    }
    if grouping.zero_point:
        tensors["weight_zero_point"] = packed["qzeros"].T
    return {n: torch.from_numpy(np.ascontiguousarray(t)) for n, t in tensors.items()}, torch.from_numpy(layer.weight())


def write_fp8(weight: torch.Tensor, quant: str, block: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
    """Tensors of a layer of 8-bit floats, and the weight they stand for."""
    n, k = weight.shape
    rows, columns = (1, k) if quant == "fp8-row" else block
    scales = torch.empty(-(-n // rows), -(-k // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = max(float(part.abs().max()) / _E4M3_MAX, 1e-6)
    if quant in ("fp8-ue8m0", "fp8-e8m0"):
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    wide = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    codes = (weight / wide).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    values = fp8_oracle.e4m3(codes.view(torch.uint8).numpy()).astype(np.float32) * wide.numpy()
    stored = scales.to(torch.float8_e8m0fnu) if quant == "fp8-e8m0" else scales
    name = "weight_scale" if quant in ("fp8-row", "ct-fp8") else "weight_scale_inv"
    return {"weight": codes, name: stored}, torch.from_numpy(values)


def _round(module: str, weight: torch.Tensor, grouping: Grouping) -> GptqLayer:
    """Round to nearest. Modules that read the same input rank it alike, as calibration makes them."""
    n, k = weight.shape
    size = k if grouping.size == -1 else grouping.size
    prefix, _, last = module.rpartition(".")
    seed = zlib.crc32(f"{prefix}.{_INPUT_OF.get(last, last)}".encode())
    group = sorted_groups(k, size, seed) if grouping.ordered else natural_groups(k, size)
    groups = math.ceil(k / size)
    zeros, scales = np.empty((n, groups), np.int64), np.empty((n, groups), np.float16)
    w = weight.numpy()
    for g in range(groups):
        part = w[:, group == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        spread = (high - low) / 15 if grouping.zero_point else np.abs(part).max(1) / 7.5
        scales[:, g] = np.maximum(spread, 1e-5)
        exact = np.rint(-low / scales[:, g].astype(np.float32))
        zeros[:, g] = np.clip(exact, 0, 15) if grouping.zero_point else 8
    steps = w / scales[:, group].astype(np.float32)
    codes = np.clip(np.rint(steps) + zeros[:, group], 0, 15).astype(np.int64)
    return GptqLayer(codes, zeros, scales, group)
