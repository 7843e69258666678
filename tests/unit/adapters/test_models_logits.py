"""Logits of every family, format and rope against `transformers` with the same dequantised weights, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint
from stepper import Placed, Stepper, relative_error

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

FAMILIES = ("llama", "qwen2", "qwen3")
FORMATS = (None, "awq-gemm", "awq-gemv", "compressed-tensors")
TOLERANCE = 1e-4
"""Float32 sums in another order: about 1e-6 here; a wrong bias, angle or slot gives 1e-2 and more."""


def load(checkpoint: TinyCheckpoint, **options: Any) -> QuantizedModelAdapter:
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=LoadOptions(**{"dtype": "float32"} | options))


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random ids; wide enough to be a different text at every position."""
    return [int(t) for t in torch.randint(0, 270, (count,), generator=torch.Generator().manual_seed(seed))]


@torch.no_grad()
def expected(checkpoint: TinyCheckpoint, *texts: list[int]) -> list[torch.Tensor]:
    """The reference's logits `[n, V]` of each text, computed whole and alone."""
    model = checkpoint.reference()
    return [model(torch.tensor([text])).logits[0] for text in texts]


@pytest.mark.parametrize("quant", FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_across_block_edges_match_transformers(
    tmp_path: Path, family: str, quant: str | None
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, family, quant, shards=2, bias_scale=20.0)
    texts = [tokens(60, 1), tokens(45, 2), tokens(24, 3)]
    wanted = expected(checkpoint, *texts)
    stepper = Stepper(load(checkpoint))
    requests = [Placed() for _ in texts]
    prompts = (37, 22, 1)
    steps = [stepper.step([(r, t[:n]) for r, t, n in zip(requests, texts, prompts, strict=True)])]
    for i in range(23):
        steps.append(stepper.step([(r, [t[n + i]]) for r, t, n in zip(requests, texts, prompts, strict=True)]))
    for got, reference in zip((torch.cat(parts) for parts in zip(*steps, strict=True)), wanted, strict=True):
        assert relative_error(got, reference) <= TOLERANCE


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_every_set_of_kernels_gives_the_same_model(tmp_path: Path, kernels: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "qwen3", "awq-gemm")
    text = tokens(40)
    got = Stepper(load(checkpoint, kernels=kernels)).run(text, [30])
    assert relative_error(got, expected(checkpoint, text)[0]) <= TOLERANCE


SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
    "yarn-mscales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_variants_match_transformers(tmp_path: Path, scaling: str, spelling: str) -> None:
    # rope_scaling is how transformers 4 wrote it, rope_parameters how 5 does.
    rope = SCALINGS[scaling]
    theta = 5000.0
    if spelling == "rope_scaling":
        config = {"rope_theta": theta, "rope_scaling": rope or None}
    else:
        config = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta} | rope}
    checkpoint = tiny_checkpoint(tmp_path, "qwen3", "awq-gemm", config=config | {"max_position_embeddings": 128})
    text = tokens(100)
    reference = expected(checkpoint, text)[0]
    assert relative_error(Stepper(load(checkpoint)).run(text, [70, 20]), reference) <= TOLERANCE
    if rope:
        plain = tiny_checkpoint(tmp_path / "plain", "qwen3", "awq-gemm", config={"rope_theta": theta})
        moved = relative_error(expected(plain, text)[0], reference)
        assert (moved > 100 * TOLERANCE) != (scaling == "dynamic"), "the variant must be visible in this text"


@torch.no_grad()
def test_dynamic_rope_beyond_its_length_is_what_transformers_decodes_token_by_token(tmp_path: Path) -> None:
    from transformers import DynamicCache

    config = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}
    checkpoint = tiny_checkpoint(tmp_path, "llama", "awq-gemm", config=config)
    text = tokens(80)
    model, cache = checkpoint.reference(), DynamicCache()
    reference = torch.cat([model(torch.tensor([[token]]), cache=cache).logits[0] for token in text])
    adapter = load(checkpoint)
    assert relative_error(Stepper(adapter).run(text, []), reference) <= TOLERANCE
    assert relative_error(Stepper(adapter).run(text, [70]), reference) <= TOLERANCE, "chunking must not show"


def test_the_rope_override_of_the_command_line_replaces_the_checkpoints(tmp_path: Path) -> None:
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    checkpoint = tiny_checkpoint(tmp_path / "a", "llama", config={"rope_scaling": None})
    twin = tiny_checkpoint(tmp_path / "b", "llama", config=scaled)
    text = tokens(40)
    got = Stepper(load(checkpoint, rope_scaling="linear", rope_factor=3.0)).run(text, [40])
    assert relative_error(got, expected(twin, text)[0]) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"rms_norm_eps": 0.3}),
    ],
    ids=["llama-all-biases", "llama-mha", "llama-mqa", "qwen3-biases", "qwen2-tied", "qwen3-large-eps"],
)
def test_config_switches_are_honoured(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint(tmp_path, family, "awq-gemm", config=config, bias_scale=3.0)
    text = tokens(40)
    got = Stepper(load(checkpoint)).run(text, [30])
    assert relative_error(got, expected(checkpoint, text)[0]) <= TOLERANCE


@pytest.mark.parametrize(("group_size", "zero_point"), [(64, True), (128, True), (-1, True), (32, False), (128, False)])
@pytest.mark.parametrize("quant", ["awq-gemm", "compressed-tensors"])
def test_group_sizes_and_symmetric_codes_match_transformers(
    tmp_path: Path, quant: str, group_size: int, zero_point: bool
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama", quant, group_size=group_size, zero_point=zero_point)
    text = tokens(33)
    got = Stepper(load(checkpoint)).run(text, [33])
    assert relative_error(got, expected(checkpoint, text)[0]) <= TOLERANCE


@pytest.mark.parametrize("dense", [("q_proj", "up_proj"), ("self_attn.v_proj", "down_proj"), ("mlp",)], ids=str)
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "unlisted"])
def test_dense_and_packed_modules_mix_within_a_layer(tmp_path: Path, dense: tuple[str, ...], listed: bool) -> None:
    checkpoint = tiny_checkpoint(
        tmp_path, "qwen2", "awq-gemm", dense_modules=dense, not_converted=list(dense) if listed else None
    )
    text = tokens(40)
    got = Stepper(load(checkpoint)).run(text, [30])
    assert relative_error(got, expected(checkpoint, text)[0]) <= TOLERANCE


def test_values_beyond_float16_inside_the_model_stay_finite_and_right(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama", dtype=torch.float32)
    name = "model.layers.0.mlp.down_proj.weight"
    checkpoint.dense[name] *= 1e5
    from builders import write_shards

    write_shards(checkpoint.path, checkpoint.dense, 1)
    text = tokens(40)
    reference = expected(checkpoint, text)[0]
    for dtype, bound in (("float32", TOLERANCE), ("bfloat16", 0.05), ("float16", TOLERANCE)):
        got = Stepper(load(checkpoint, dtype=dtype)).run(text, [30])
        assert relative_error(got, reference) <= bound, dtype
