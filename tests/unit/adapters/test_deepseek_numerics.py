"""Values at the edge of number formats: what stays right, and what fails one request by name and no other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyCheckpoint, tiny_checkpoint, write_shards
from engine_driver import Driver
from oracles import deepseek
from safetensors.torch import load_file, save_file
from stepper import Placed, Stepper, relative_error

from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import StopRule
from deepseek_tgi.errors import GenerationError

LONG = [(17 * i + 3) % 270 for i in range(150)]


def load(checkpoint: TinyCheckpoint, **options: Any) -> QuantizedModelAdapter:
    merged: dict[str, Any] = {"dtype": "float32", "num_threads": 1, **options}
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=LoadOptions(**merged))


def scaled(path: Path, family: str, factors: dict[str, float], **spec: Any) -> TinyCheckpoint:
    """A dense float32 checkpoint in which the tensors that end so are multiplied."""
    checkpoint = tiny_checkpoint(path, family, dtype=torch.float32, **spec)
    for name, tensor in checkpoint.dense.items():
        for ending, factor in factors.items():
            if name.endswith(ending):
                tensor.mul_(factor)
    write_shards(path, checkpoint.dense, 1)
    return checkpoint


def truth(checkpoint: TinyCheckpoint, text: list[int]) -> torch.Tensor:
    return torch.from_numpy(deepseek.logits(checkpoint.config, checkpoint.dense, text)).float()


@pytest.mark.parametrize("name", ["layers.0.mlp.down_proj.weight", "experts.3.down_proj.weight", "o_proj.weight"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_outputs_beyond_float16_stay_finite_and_right_in_every_dtype(tmp_path: Path, name: str, dtype: str) -> None:
    checkpoint = scaled(tmp_path, "deepseek_v3", {name: 1e6})
    got = Stepper(load(checkpoint, dtype=dtype)).run(LONG, [100, 40])
    wanted = truth(checkpoint, LONG)
    if dtype != "bfloat16":
        assert relative_error(got, wanted) <= 1e-4
        return
    # What enters products is rounded to 8 bits; at near ties of the router another expert is then chosen, rightly.
    assert bool(got.isfinite().all())
    assert float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).quantile(0.8)) <= 0.05


def test_packed_outputs_beyond_float16_are_right_too(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v3", "awq-gemm")
    file, module = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj"
    tensors = load_file(file)
    tensors[f"{module}.scales"] *= 2**16
    save_file(tensors, str(file))
    checkpoint.dense[f"{module}.weight"] *= 2**16
    for kernels in ("native", "torch"):
        got = Stepper(load(checkpoint, dtype="float16", kernels=kernels)).run(LONG[:40], [30])
        assert relative_error(got, truth(checkpoint, LONG[:40])) <= 1e-4


EXTREMES: dict[str, tuple[dict[str, float], float]] = {
    "large-latents": ({"kv_a_layernorm.weight": 1e4, "kv_b_proj.weight": 1e-4}, 1e-4),
    "small-latents": ({"kv_a_layernorm.weight": 1e-6, "kv_b_proj.weight": 1e6}, 1e-4),
    "large-scores": ({"q_proj.weight": 1e3, "q_b_proj.weight": 1e3}, 1e-2),
    "large-rope-keys": ({"kv_a_proj_with_mqa.weight": 1e3}, 1e-2),
    "flat-router": ({"mlp.gate.weight": 1e-2}, 1e-4),
    "large-router": ({"mlp.gate.weight": 10.0}, 1e-3),
}
"""Factors, and the agreement to expect: where scores reach thousands, a float32 holds 1e-4 of one."""


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_extreme_latents_scores_and_router_logits_are_the_reference(tmp_path: Path, family: str, name: str) -> None:
    factors, bound = EXTREMES[name]
    checkpoint = scaled(tmp_path, family, factors)
    text = LONG[:60]
    assert relative_error(Stepper(load(checkpoint)).run(text, [40]), truth(checkpoint, text)) <= bound


@pytest.mark.parametrize("mode", ["fp8_e4m3fn", "int8", "int4"])
def test_rotary_keys_beside_a_quantised_latent_are_not_quantised(tmp_path: Path, mode: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "deepseek_v3", "awq-gemm")
    stored = []
    for cache in ("float32", mode):
        stepper, sequence = Stepper(load(checkpoint, kv_cache_dtype=cache)), Placed()
        stepper.step([(sequence, LONG)])
        slots = torch.tensor(stepper.slots(sequence, 0, len(LONG)))
        stored.append(stepper.pool.read_latents(0, slots))
    (exact, exact_rope), (low, low_rope) = stored
    assert torch.equal(low_rope, exact_rope.bfloat16().float()), "the first layer's, which no cache has touched"
    off = relative_error(low, exact)
    assert 0 < off <= {"fp8_e4m3fn": 0.05, "int8": 0.015, "int4": 0.2}[mode]


@pytest.mark.parametrize("mode", ["float16", "fp8_e4m3fn", "int8", "int4"])
def test_latents_beyond_float16_saturate_and_never_spread(tmp_path: Path, mode: str) -> None:
    checkpoint = scaled(tmp_path, "deepseek_v2", {"kv_a_layernorm.weight": 1e6, "kv_b_proj.weight": 1e-6})
    logits = Stepper(load(checkpoint, kv_cache_dtype=mode)).run(LONG[:60], [40])
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("factor", [1e3, 1e8, 1e30])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_saturated_routing_is_finite(tmp_path: Path, family: str, factor: float) -> None:
    checkpoint = scaled(tmp_path, family, {"mlp.gate.weight": factor})
    for kernels in ("native", "torch"):
        logits = Stepper(load(checkpoint, kernels=kernels)).run(LONG[:40], [30])
        assert bool(logits.isfinite().all()), kernels


BAD = "Z"
"""A letter whose token is sent to an expert that overflows float32."""
GOOD = ["hello the thing", "an other ring in the wing", "a b c d e f"]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Expert 7 is chosen for one letter only, and its output passes the largest float32."""
    path = tmp_path_factory.mktemp("overflow")
    config = {"first_k_dense_replace": 0, "num_hidden_layers": 1, "n_group": 1, "topk_group": 1}
    checkpoint = tiny_checkpoint(path, "deepseek_v3", dtype=torch.float32, config=config)
    w = checkpoint.dense
    gate, bias = w["model.layers.0.mlp.gate.weight"], w["model.layers.0.mlp.gate.e_score_correction_bias"]
    table = w["model.embed_tokens.weight"]
    table[ord(BAD)] *= 10  # so that attention does not turn it away
    gate.mul_(0.01)
    bias.zero_()
    gate[7] = table[ord(BAD)] * w["model.layers.0.post_attention_layernorm.weight"] / table[ord(BAD)].norm()
    bias[7] = -0.48  # the other letters' scores of 0.5 win over anything but a sure one
    w["model.layers.0.mlp.experts.7.down_proj.weight"].copy_(torch.full((128, 64), 3e38))
    write_shards(path, w, 1)
    return checkpoint


@pytest.mark.parametrize("mode", ["float32", "int4"])
def test_an_overflow_ends_its_request_by_name_and_leaves_neighbours_alone(
    overflowing: TinyCheckpoint, mode: str
) -> None:
    counts: Counter[str] = Counter()

    def count(name: str, by: int) -> None:
        counts[name] += by

    driver = Driver(load(overflowing, kv_cache_dtype=mode), max_prefill=128, counter=count)
    stop = StopRule(5, ignore_eos=True)
    alone = [driver.run(driver.request(text, stop=stop))[0] for text in GOOD]
    assert all(len(found.ids) == 5 for found in alone)
    assert not counts
    bad = driver.request(f"the {BAD}", stop=stop)
    found = driver.run(driver.request(GOOD[0], stop=stop), bad, *(driver.request(t, stop=stop) for t in GOOD[1:]))
    assert counts == {"requests_failed": 1}
    for got, wanted in zip([found[0], *found[2:]], alone, strict=True):
        assert got.ids == wanted.ids
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    assert found[1].done
    assert len(found[1].ids) == 1, "it ends with an end token and nothing more"
    with pytest.raises(GenerationError, match=r"request \d+: after 0 tokens: .*finite"):
        driver.run(driver.request(f"the {BAD}", stop=stop))
    assert counts == {"requests_failed": 2}
    again = driver.run(driver.request(GOOD[0], stop=stop))[0]
    assert again.ids == alone[0].ids
