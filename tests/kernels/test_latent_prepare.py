"""Norm, rotation and storing of latents in one operation: the bits of its parts, wherever the rows lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

HEADS, NOPE, ROPE, RANK = 3, 10, 6, 48


def inputs_of(slots: list[int], positions: list[int]) -> ForwardInputs:
    count = len(slots)
    return ForwardInputs(
        input_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots),
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
        block_tables=torch.zeros(count, 8, dtype=torch.int32),
        cache_lens=torch.tensor(positions, dtype=torch.int32),
        logit_rows=torch.arange(count),
        max_seqlen=1,
        max_context=max(positions, default=0) + 1,
    )


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q with heads side by side, the latent and its rotary key: all parts of one row, as the projections leave them."""
    wide = torch.randn(count, HEADS * (ROPE + NOPE) + RANK + ROPE)
    q = wide[:, : HEADS * (ROPE + NOPE)].view(count, HEADS, ROPE + NOPE)
    return q, wide[:, -RANK - ROPE : -ROPE], wide[:, -ROPE:]


def table(positions: int = 80) -> torch.Tensor:
    angles = torch.rand(positions, ROPE // 2) * 6
    return torch.cat((angles.cos(), angles.sin()), 1)


@pytest.mark.parametrize("mode", list(KVMode), ids=lambda m: m.value)
@pytest.mark.parametrize("count", [1, 5, 37])
def test_bits_are_those_of_norm_rotation_and_write_apart(any_kernels: KernelSet, mode: KVMode, count: int) -> None:
    places = torch.randperm(6 * 16)[:count].tolist()
    inputs = inputs_of([-1 if i == 3 else place for i, place in enumerate(places)], [7 * i % 80 for i in range(count)])
    q, latent, rope = rows(count)
    weight, cos_sin = torch.rand(RANK) + 0.5, table()
    apart, whole = (KVPool(LatentLayout(2, RANK, ROPE, mode), 6) for _ in range(2))
    q0, latent0, rope0 = q.clone(), latent.clone(), rope.clone()
    any_kernels.rms_norm(latent0, weight, 1e-6, latent0)
    any_kernels.rope(q0, rope0.unsqueeze(1), inputs.positions, cos_sin)
    any_kernels.latent_write(apart.latents(1), latent0, rope0, inputs.slots)
    any_kernels.latent_prepare(q, latent, rope, whole.latents(1), inputs, norm_weight=weight, eps=1e-6, cos_sin=cos_sin)
    for got, wanted in ((q, q0), (latent, latent0), (rope, rope0), (whole.storage, apart.storage)):
        assert torch.equal(got, wanted)


def test_another_layer_of_the_same_step_has_its_own_norm_and_pages(native: KernelSet) -> None:
    pool, inputs, cos_sin = KVPool(LatentLayout(2, RANK, ROPE, KVMode.FLOAT32), 6), inputs_of([20], [4]), table()
    q, latent, rope = rows(1)
    kept = latent.clone()
    for layer, weight in enumerate((torch.rand(RANK), torch.rand(RANK))):
        latent.copy_(kept)
        native.latent_prepare(
            q, latent, rope, pool.latents(layer), inputs, norm_weight=weight, eps=1e-6, cos_sin=cos_sin
        )
        stored, _ = pool.read_latents(layer, torch.tensor([20]))
        assert torch.equal(stored, native.rms_norm(kept, weight, 1e-6))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"latent": torch.zeros(2, RANK - 16)}, "weight"),
        ({"norm_weight": torch.zeros(RANK - 1)}, "weight"),
        ({"q": torch.zeros(2, HEADS, ROPE + NOPE, dtype=torch.float64)}, "q"),
        ({"rope": torch.zeros(3, ROPE)}, "positions|rope"),
        ({"cos_sin": torch.zeros(4, ROPE)}, "cos_sin has 4 positions, the step reaches 6"),
        ({"slots": [0, 96]}, "slot 96, expected below 96"),
    ],
    ids=["latent", "norm", "q", "rope", "table", "slot"],
)
def test_operands_that_do_not_fit_are_refused(native_exact: KernelSet, change: dict[str, Any], complaint: str) -> None:
    pool = KVPool(LatentLayout(1, RANK, ROPE, KVMode.FLOAT32), 6)
    q, latent, rope = rows(2)
    inputs = inputs_of(change.get("slots", [0, 1]), [0, 5])
    operands = {"q": q, "latent": latent, "rope": rope, "norm_weight": torch.ones(RANK), "cos_sin": table()}
    given: dict[str, Any] = {name: change.get(name, value) for name, value in operands.items()}
    with pytest.raises(GenerationError, match=complaint):
        native_exact.latent_prepare(pages=pool.latents(0), inputs=inputs, eps=1e-6, **given)


def test_slots_are_checked_again_for_another_pool(native_exact: KernelSet) -> None:
    large, small = (KVPool(LatentLayout(1, RANK, ROPE, KVMode.FLOAT32), blocks) for blocks in (6, 2))
    q, latent, rope = rows(1)
    inputs = inputs_of([50], [4])
    how: dict[str, Any] = {"norm_weight": torch.ones(RANK), "eps": 1e-6, "cos_sin": table()}
    native_exact.latent_prepare(q, latent, rope, large.latents(0), inputs, **how)
    with pytest.raises(GenerationError, match="slot 50"):
        native_exact.latent_prepare(q, latent, rope, small.latents(0), inputs, **how)
    native_exact.latent_prepare(q, latent, rope, small.latents(0), replace(inputs, slots=torch.tensor([5])), **how)
