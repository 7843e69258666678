"""DeepSeek-V2 and V3 against `transformers` and the published arithmetic, step by step, in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint, write_shards
from deepseek_checkpoint import YARN
from oracles import deepseek
from safetensors import safe_open
from stepper import Placed, Stepper, relative_error

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

TOLERANCE = 1e-4
"""Float32 sums in another order give 2e-6; a wrong angle, expert, factor or slot 1e-2 and more."""
TEXTS = [[(13 * i + 7 * j + i * j * j) % 270 for j in range(n)] for i, n in enumerate((60, 45, 24), 1)]
PROMPTS = (37, 22, 1)
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V2, V3 = "deepseek_v2", "deepseek_v3"

AGREED: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": (V2, {}),
    "v2-low-rank-queries": (V2, {"q_lora_rank": 192}),
    "v2-groups": (V2, {**GROUPED, "routed_scaling_factor": 16.0}),
    "v2-two-shared": (V2, {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "v2-scaled": (V2, {"routed_scaling_factor": 16.0}),
    "v2-bias": (V2, {"attention_bias": True}),
    "v2-bias-low-rank": (V2, {"attention_bias": True, "q_lora_rank": 192}),
    "v2-tied": (V2, {"tie_word_embeddings": True}),
    "v2-large-eps": (V2, {"rms_norm_eps": 0.3, "q_lora_rank": 192}),
    "v2-yarn": (V2, {"rope_scaling": YARN}),
    "v2-yarn-both": (V2, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "v2-yarn-no-stretch": (V2, {"rope_scaling": YARN | {"factor": 1}}),
    "v3": (V3, {}),
    "v3-direct-queries": (V3, {"q_lora_rank": None}),
    "v3-not-normalised": (V3, {"norm_topk_prob": False}),
    "v3-not-scaled": (V3, {"routed_scaling_factor": 1.0}),
    "v3-neither": (V3, {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    "v3-one-group": (V3, {"n_group": 1, "topk_group": 1}),
    "v3-two-shared": (V3, {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "v3-all-dense": (V3, {"first_k_dense_replace": 2}),
    "v3-bias": (V3, {"attention_bias": True}),
    "v3-halves": (V3, {"rope_interleave": False}),
    "v3-pairs": (V3, {"rope_interleave": True}),
    "v3-yarn": (V3, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3-yarn-newer-spelling": (
        V3,
        {"rope_theta": None, "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 5000.0}},
    ),
    "v3-linear": (V3, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "v3-linear-sharper": (V3, {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}}),
}
"""Where `transformers` computes what the published files do: both are the measure."""
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-normalised": (V2, {"norm_topk_prob": True}),
    "v2-normalised-scaled": (V2, {"norm_topk_prob": True, "routed_scaling_factor": 16.0}),
    "v2-every-other-layer": (V2, {"moe_layer_freq": 2, "num_hidden_layers": 4}),
    "v2-halves": (V2, {"rope_interleave": False}),
    "v2-no-shared": (V2, {"n_shared_experts": None}),
    "v2-no-experts": (V2, {"n_routed_experts": None}),
    "v2-yarn-mscale-alone": (V2, {"rope_scaling": YARN | {"mscale_all_dim": 0}}),
    "v2-yarn-mscale-absent": (V2, {"rope_scaling": YARN | {"mscale": None}}),
    "v2-yarn-all-dim-absent": (V2, {"rope_scaling": YARN | {"mscale_all_dim": None}}),
    "v2-yarn-neither": (V2, {"rope_scaling": YARN | {"mscale": None, "mscale_all_dim": None}}),
    "v3-no-shared": (V3, {"n_shared_experts": 0}),
}
"""Where it does not, or cannot: the oracle says why; only the oracle is the measure."""
VARIANTS = AGREED | PUBLISHED


def load(checkpoint: TinyCheckpoint, **options: Any) -> QuantizedModelAdapter:
    wished: dict[str, Any] = {"dtype": "float32", "num_threads": 1} | options
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=LoadOptions(**wished))


def truth(checkpoint: TinyCheckpoint, text: list[int]) -> torch.Tensor:
    """The published arithmetic's logits `[n, V]` of a text computed whole and alone."""
    given = {k: v for k, v in (checkpoint.config.get("rope_scaling") or {}).items() if v is not None}
    config = checkpoint.config | {"rope_scaling": given or None}
    return torch.from_numpy(deepseek.logits(config, checkpoint.dense, text)).float()


@torch.no_grad()
def transformers_logits(checkpoint: TinyCheckpoint, text: list[int]) -> torch.Tensor:
    return checkpoint.reference()(torch.tensor([text])).logits[0]


def batched(adapter: QuantizedModelAdapter) -> list[torch.Tensor]:
    """All texts in one batch: prompts of unequal length at once, then every further token step by step."""
    stepper, requests = Stepper(adapter), [Placed() for _ in TEXTS]
    steps = [stepper.step([(r, t[:n]) for r, t, n in zip(requests, TEXTS, PROMPTS, strict=True)])]
    for i in range(23):
        steps.append(stepper.step([(r, [t[n + i]]) for r, t, n in zip(requests, TEXTS, PROMPTS, strict=True)]))
    return [torch.cat(parts) for parts in zip(*steps, strict=True)]


def with_reused_prefix(adapter: QuantizedModelAdapter, text: list[int]) -> torch.Tensor:
    """Logits of `text` from its third block on, over two blocks that another request stored."""
    stepper, first = Stepper(adapter), Placed()
    stepper.step([(first, text[:35])])
    second = Placed(list(first.blocks[:2]), 32)
    parts = stepper.step([(second, text[32:40])])
    parts += [stepper.step([(second, [token])])[0] for token in text[40:]]
    return torch.cat(parts)


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_and_every_decode_step_are_the_reference(tmp_path: Path, name: str) -> None:
    family, config = VARIANTS[name]
    checkpoint = tiny_checkpoint(tmp_path, family, config=config, bias_scale=3.0)
    wanted = [truth(checkpoint, text) for text in TEXTS]
    if name in AGREED:
        assert relative_error(transformers_logits(checkpoint, TEXTS[0]), wanted[0]) <= TOLERANCE / 10
    adapter = load(checkpoint)
    for got, reference in zip(batched(adapter), wanted, strict=True):
        assert relative_error(got, reference) <= TOLERANCE


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", ["v2-groups", "v2-yarn-both", "v3", "v3-bias", "v3-halves"])
def test_chunks_and_reused_prefixes_do_not_show(tmp_path: Path, name: str, kernels: str) -> None:
    family, config = VARIANTS[name]
    quant = "awq-gemm" if kernels == "native" else None  # torch unpacks a weight on every call
    checkpoint = tiny_checkpoint(tmp_path, family, quant, config=config, bias_scale=3.0)
    adapter, wanted = load(checkpoint, kernels=kernels), truth(checkpoint, TEXTS[0])
    for chunks in ([60], [16, 16], [1, 15, 17, 20]):
        assert relative_error(Stepper(adapter).run(TEXTS[0], chunks), wanted) <= TOLERANCE
    assert relative_error(with_reused_prefix(adapter, TEXTS[0]), wanted[32:]) <= TOLERANCE


@pytest.mark.parametrize("mode", ["float32", "int4"])
@pytest.mark.parametrize("family", [V2, V3])
def test_a_row_has_the_same_bits_alone_and_among_others(tmp_path: Path, family: str, mode: str) -> None:
    adapter = load(tiny_checkpoint(tmp_path, family, "awq-gemm"), kernels="native", kv_cache_dtype=mode, num_threads=2)
    for got, text, prompt in zip(batched(adapter), TEXTS, PROMPTS, strict=True):
        assert torch.equal(got, Stepper(adapter, seed=prompt).run(text, [prompt])[: len(got)])


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("family", [V2, V3])
def test_every_set_of_kernels_gives_the_same_model(tmp_path: Path, family: str, kernels: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, family, "awq-gemm")
    text = TEXTS[2][:19] if kernels == "torch" else TEXTS[2][:5]
    got = Stepper(load(checkpoint, kernels=kernels)).run(text, [len(text) - 2])
    assert relative_error(got, truth(checkpoint, text)) <= TOLERANCE


@pytest.mark.parametrize("quant", ["awq-gemm", "awq-gemv", "compressed-tensors"])
@pytest.mark.parametrize("name", ["v2", "v2-low-rank-queries", "v3"])
def test_a_packed_up_projection_equals_its_dense_twin(tmp_path: Path, name: str, quant: str) -> None:
    family, config = VARIANTS[name]
    packed = tiny_checkpoint(tmp_path / "packed", family, quant, config=config)
    kept = ["lm_head", "mlp.gate", "self_attn.kv_b_proj"]
    mixed = tiny_checkpoint(tmp_path / "mixed", family, quant, config=config, not_converted=kept)
    assert "model.layers.0.self_attn.kv_b_proj.weight" not in stored_names(packed)
    assert "model.layers.0.self_attn.kv_b_proj.weight" in stored_names(mixed)
    twin = tmp_path / "twin"
    shutil.copytree(packed.path, twin)
    plain = {k: v for k, v in packed.config.items() if k != "quantization_config"}
    (twin / "config.json").write_text(json.dumps(plain))
    write_shards(twin, packed.dense, 1)
    got = [Stepper(load(c)).run(TEXTS[0], [37]) for c in (packed, mixed, TinyCheckpoint(twin, plain, packed.dense))]
    assert relative_error(got[0], truth(packed, TEXTS[0])) <= TOLERANCE
    assert relative_error(got[1], truth(mixed, TEXTS[0])) <= TOLERANCE
    assert relative_error(got[0], got[2]) <= TOLERANCE / 10


@pytest.mark.parametrize("dense", ["kv_a_proj_with_mqa", "q_a_proj", "o_proj", "shared_experts"])
def test_modules_left_dense_in_a_packed_checkpoint_are_read_so(tmp_path: Path, dense: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, V3, "awq-gemm", config={"attention_bias": True}, not_converted=[dense])
    for got, text in zip(batched(load(checkpoint)), TEXTS, strict=True):
        assert relative_error(got, truth(checkpoint, text)) <= TOLERANCE
    assert relative_error(Stepper(load(checkpoint)).run(TEXTS[2], [20]), truth(checkpoint, TEXTS[2])) <= TOLERANCE


@pytest.mark.parametrize("listed", [None, [], ["mlp.gate"], ...], ids=["null", "empty", "gate", "absent"])
def test_a_router_is_dense_whatever_the_list_of_exceptions_says(
    tmp_path: Path, listed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, V2, "awq-gemm", not_converted=None if listed is ... else listed)
    if listed is ...:
        del checkpoint.config["quantization_config"]["modules_to_not_convert"]
        (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    got = Stepper(load(checkpoint)).run(TEXTS[2], [20])
    assert relative_error(got, truth(checkpoint, TEXTS[2])) <= TOLERANCE
    assert not [r.message for r in caplog.records if "stored dense" in r.message]


def stored_names(checkpoint: TinyCheckpoint) -> set[str]:
    with safe_open(checkpoint.path / "model.safetensors", "pt") as file:
        return set(file.keys())
