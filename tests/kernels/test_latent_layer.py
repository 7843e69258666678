"""A decode step's latent layer, emulated: against the formulas in numpy, and its parts where they serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms
from kernels.test_latent_cuda import never, step
from oracles import latents as oracle

from deepseek_tgi.kernels.latent_attention.cuda import SEVERAL, CudaLatentAttention, CudaUp
from deepseek_tgi.kernels.latent_attention.decode import MODES, RANK, ROPE, LatentDecode
from deepseek_tgi.kernels.latent_layer.cuda import CudaLatentLayer
from deepseek_tgi.kernels.latent_prepare.cuda import CudaLatentPrepare, CudaLatentWrite
from deepseek_tgi.kernels.latent_write.cpu import latent_write
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

NOPE, VALUE, EPS, SCALE = 64, 128, 1e-6, 0.08


def attended(mode: str, heads: int, cached: list[int], *, block: int = 16) -> None:
    """Run a decode step and hold outputs and pages against float64."""
    torch.manual_seed(0)
    batch, columns = len(cached), -(-(max(cached) + 1) // block)
    pool = KVPool(LatentLayout(2, RANK, ROPE, KVMode(mode), block), columns * batch + 1)
    pool.storage.fill_(0xFF)  # NaN in every float format: what was not written must not be read
    tables = (torch.randperm(columns * batch) + 1).view(batch, columns).int()
    places = [row.long()[torch.arange(n + 1) // block] * block + torch.arange(n + 1) % block
              for row, n in zip(tables, cached, strict=True)]  # fmt: skip
    for slots in places:
        latent_write(pool.latents(1), torch.randn(len(slots) - 1, RANK), torch.randn(len(slots) - 1, ROPE), slots[:-1])
    rows = torch.randn(batch, heads * (ROPE + NOPE) + RANK + ROPE).bfloat16()
    given, first = rows.double().numpy(), heads * (ROPE + NOPE)
    angles = torch.rand(max(cached) + 1, ROPE // 2) * 6
    norm = torch.rand(RANK) + 0.5
    weight = (torch.randn(heads * (NOPE + VALUE), RANK) * RANK**-0.5).bfloat16().float()
    inputs = replace(
        step([1] * batch, cached, tables), slots=torch.stack([slots[-1] for slots in places]),
        positions=torch.tensor(cached, dtype=torch.int32),
    )  # fmt: skip
    programs = EmulatedPrograms()
    prepare = CudaLatentPrepare(CudaLatentWrite(cast("Any", None)), never)
    layer = CudaLatentLayer(prepare, CudaLatentAttention(LatentDecode(programs, 2), cast("Any", None)))
    out = torch.full((batch, heads, VALUE), float("nan"), dtype=torch.bfloat16)
    layer(
        rows[:, :first].view(batch, heads, -1), rows[:, first:-ROPE], rows[:, -ROPE:], pool.latents(1), inputs,
        up=CudaUp(weight, heads, NOPE), norm_weight=norm, eps=EPS,
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1), scale=SCALE, out=out,
    )  # fmt: skip
    for b, (slots, n) in enumerate(zip(places, cached, strict=True)):
        latent, rope = (x.double().numpy() for x in pool.read_latents(1, slots))
        own = given[b, first:-ROPE]
        normed = own / np.sqrt((own**2).mean() + EPS) * norm.double().numpy()
        coarse = {"int8": 0.02, "fp8_e4m3fn": 0.05, "int4": 0.15}.get(mode, 2**-7)
        assert np.linalg.norm(latent[n] - normed) <= coarse * np.linalg.norm(normed)
        turn = np.exp(1j * angles[n].double().numpy())
        assert np.allclose(rope[n], turned(given[b, -ROPE:], turn), rtol=2**-8, atol=1e-6)
        q = given[b, :first].reshape(1, heads, -1).copy()
        for h in range(heads):
            q[0, h, :ROPE] = turned(q[0, h, :ROPE], turn)
        wanted = oracle.attention(q, latent, rope, weight.view(heads, -1, RANK).numpy(), n, SCALE)
        assert np.linalg.norm(out[b : b + 1].double().numpy() - wanted) <= 1e-2 * np.linalg.norm(wanted), (b, n)


def turned(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Halves of `x` as real and imaginary parts, rotated."""
    pair = (x[: ROPE // 2] + 1j * x[ROPE // 2 :]) * turn
    return np.concatenate((pair.real, pair.imag))


@pytest.mark.parametrize("mode", MODES)
def test_a_decode_step_is_the_formulas(mode: str) -> None:
    attended(mode, 2, [0, 150, 17], block=48)


def test_more_requests_than_heads_and_than_a_tile_has_rows() -> None:
    attended("int8", 3, [*range(0, 90, 5)])


@pytest.mark.parametrize("why", ["rows", "prompt", "width"])
def test_other_steps_take_the_parts(why: str, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    class Part:
        def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
            calls.append(args)
            return torch.zeros(())

    part: Any = Part()
    heads, batch, nope = 2, SEVERAL + 1 if why == "rows" else 2, 16 if why == "width" else NOPE
    inputs = step([1] * batch, [3] * batch, torch.zeros(batch, 1, dtype=torch.int32))
    if why == "prompt":
        inputs = replace(inputs, max_seqlen=2)
    q = torch.zeros(batch, heads, ROPE + nope, dtype=torch.bfloat16)
    pages = KVPool(LatentLayout(1, RANK, ROPE, KVMode.INT8), 1).latents(0)
    caplog.set_level("INFO")
    CudaLatentLayer(part, part)(
        q, torch.zeros(batch, RANK, dtype=torch.bfloat16), q[:, 0, :ROPE], pages, inputs,
        up=CudaUp(torch.zeros(heads * (nope + VALUE), RANK), heads, nope), norm_weight=torch.ones(RANK), eps=EPS,
        cos_sin=torch.zeros(4, ROPE), scale=SCALE, out=torch.zeros(batch, heads, VALUE, dtype=torch.bfloat16),
    )  # fmt: skip
    assert len(calls) == 2
    assert ["heads of 16 elements" in message for message in caplog.messages] == [True] * (why == "width")
