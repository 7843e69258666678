"""The write of heads into pages in CUDA C++, emulated: bytes against the formats restated, turns against numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms
from oracles import kernels as oracle
from oracles import latents as formats

from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.cuda.heads import HeadWriter, Norms, Turns
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.kv_write.cuda import KvWriteOp
from deepseek_tgi.kernels.select import select_kernels
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

MODES = [KVMode.FLOAT32, KVMode.BFLOAT16, KVMode.FLOAT16, KVMode.INT8, KVMode.FP8]
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
REFERENCE = select_kernels("cpu", ComputeDtype.FLOAT32, "reference", 1)
KV_HEADS, K_DIM, V_DIM, BLOCK = 3, 72, 40, 32


def make_pool(mode: KVMode) -> KVPool:
    pool = KVPool(KVLayout(2, KV_HEADS, K_DIM, V_DIM, mode, BLOCK), 4)
    pool.storage.fill_(0xFF)
    return pool


def awkward_vectors(width: int) -> torch.Tensor:
    """Vectors that quantisers trip over: constant, zero, one outlier, large offset, beyond float16, subnormal, NaN."""
    noise = torch.randn(10, width)
    noise[1] = 7.123
    noise[2] = 0.0
    noise[3, 5] = 1e4
    noise[4] = 100 + 0.01 * noise[4]
    noise[5] *= 1e30
    noise[6] *= 1e-9
    noise[7] = -1e-9
    noise[8] = -100 - 0.01 * noise[8]
    noise[9, 17] = float("nan")
    return noise


def stored(mode: KVMode, x: np.ndarray) -> tuple[Sequence[float], Sequence[float]]:
    """What a vector becomes by the format's own rules, and its scales."""
    if mode is KVMode.INT8:
        q, scale, zero = oracle.int8_vector(x)
        return q.tolist(), [scale, zero]
    if mode is KVMode.FP8:
        codes, scale = formats.fp8(np.clip(x, -65504, 65504))
        return codes, [scale]
    if mode is KVMode.BFLOAT16:
        return torch.from_numpy(x).bfloat16().tolist(), []
    return (x if mode is KVMode.FLOAT32 else np.clip(x, -65504, 65504).astype(np.float16)).tolist(), []


def read(pool: KVPool, slot: int, head: int) -> list[tuple[list[float], list[float]]]:
    """Key and value at a slot as they lie there."""
    pages, (page, place) = pool.view(1), divmod(slot, BLOCK)
    return [
        (rows[page, head, place].tolist(), [] if scales is None else scales[page, head, place].tolist())
        for rows, scales in ((pages.k, pages.k_scale), (pages.v, pages.v_scale))
    ]


@EVERY_MODE
def test_stored_numbers_are_the_formats_own(mode: KVMode) -> None:
    pool = make_pool(mode)
    k, v = (awkward_vectors(d).unsqueeze(1).repeat(1, KV_HEADS, 1) for d in (K_DIM, V_DIM))
    slots = torch.randperm(4 * BLOCK)[: k.shape[0]]
    HeadWriter(EmulatedPrograms())(None, k, v, pool.view(1), slots)
    for t in range(9):
        assert read(pool, int(slots[t]), 2) == [stored(mode, k[t, 2].numpy()), stored(mode, v[t, 2].numpy())]
    lost = pool.read(1, slots[9:])
    assert all(bool(x.isnan().any(-1).all()) for x in lost)


@EVERY_MODE
def test_what_has_no_slot_is_not_written(mode: KVMode) -> None:
    pool = make_pool(mode)
    before = pool.storage.clone()
    k, v = (torch.randn(3, KV_HEADS, d) for d in (K_DIM, V_DIM))
    HeadWriter(EmulatedPrograms())(None, k, v, pool.view(1), torch.tensor([-1, -1, -1]))
    assert torch.equal(pool.storage, before)


@pytest.mark.parametrize("rotary", [72, 32], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_heads_are_normalised_and_turned(rotary: int, dtype: torch.dtype, normed: bool) -> None:
    pool, tokens, heads = make_pool(KVMode.FLOAT32), 5, 6
    row = torch.randn(tokens, (heads + KV_HEADS) * K_DIM + KV_HEADS * V_DIM).to(dtype)
    split = heads * K_DIM, (heads + KV_HEADS) * K_DIM
    q, k = row[:, : split[0]].view(tokens, heads, -1), row[:, split[0] : split[1]].view(tokens, KV_HEADS, -1)
    v = row[:, split[1] :].view(tokens, KV_HEADS, -1)
    angles = torch.rand(50, rotary // 2) * 6
    positions = torch.tensor([7, 0, 49, 3, 3], dtype=torch.int32)
    norms = Norms(torch.rand(K_DIM) + 0.5, torch.rand(K_DIM) + 0.5, 1e-5) if normed else None
    wanted = []
    for x, weight in ((q, None if norms is None else norms.q), (k, None if norms is None else norms.k)):
        y = x.float().numpy() if weight is None else oracle.rms_norm(x.float().numpy(), weight.numpy(), 1e-5)
        wanted.append(oracle.rotate(y, angles.numpy()[positions.numpy()]))
    plain_v = v.clone()
    slots = torch.tensor([3, -1, 70, 4, 100])
    turns = Turns(positions, torch.cat((angles.cos(), angles.sin()), 1), True)
    HeadWriter(EmulatedPrograms())(q, k, v, pool.view(1), slots, turns=turns, norms=norms)
    # Two roundings, of numbers up to twice as large as the result.
    step = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    for got, want in zip((q, k), wanted, strict=True):
        assert np.abs(got.float().numpy() - want).max() <= step * np.abs(want).max()
    kept = slots >= 0
    keys, values = pool.read(1, slots[kept])
    assert torch.equal(keys, k.float()[kept])
    assert torch.equal(values, plain_v.float()[kept])


@pytest.mark.parametrize("mode", [KVMode.INT8, KVMode.FP8], ids=lambda m: m.value)
def test_keys_in_a_frame_are_stored_without_its_centre(mode: KVMode) -> None:
    pool, tokens = make_pool(mode), 4
    k, v = (torch.randn(tokens, KV_HEADS, d) for d in (K_DIM, V_DIM))
    positions, centre = torch.tensor([0, 9, 31, 17], dtype=torch.int32), torch.randn(KV_HEADS, K_DIM) * 30
    angles = torch.rand(40, 16) * 6
    cos, sin = angles.cos(), angles.sin()
    frame = Frame(centre, k_scale=0.0625, v_scale=0.125)
    HeadWriter(EmulatedPrograms())(
        None, k, v, pool.view(1), torch.arange(tokens), turns=Turns(positions, torch.cat((cos, sin), 1), False),
        frame=frame,
    )  # fmt: skip
    for t in range(tokens):
        at = int(positions[t])
        a, b = centre[1, :16].numpy(), centre[1, 16:32].numpy()
        c, s = cos[at].numpy(), sin[at].numpy()
        off = np.concatenate((a * c - b * s, b * c + a * s, centre[1, 32:].numpy()))
        (codes, scales), (_, v_scales) = read(pool, t, 1)
        if mode is KVMode.INT8:
            assert (codes, scales) == stored(mode, k[t, 1].numpy() - off)
        else:
            assert (scales, v_scales) == ([0.0625], [0.125])
            steps = torch.from_numpy((k[t, 1].numpy() - off) / np.float32(0.0625)).clamp(-448, 448)
            assert codes == steps.to(torch.float8_e4m3fn).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("width", "framed"),
    [(32, "plain"), (64, "shaped"), (96, "shaped"), (128, "plain"), (128, "centred"), (128, "shaped"), (256, "shaped")],
)
def test_int4_bytes_are_those_of_the_reference(width: int, framed: str) -> None:
    kv_heads, tokens = 2, 10
    pools = [KVPool(KVLayout(1, kv_heads, width, width, KVMode.INT4), 2) for _ in range(2)]
    k, v = (torch.stack([awkward_vectors(width), torch.randn(10, width)], 1) for _ in range(2))
    angles = torch.rand(40, width // 4) * 6
    placed = None
    if framed != "plain":
        k[:5] += torch.randn(width) * 9
        aim = torch.nn.functional.normalize(torch.randn(kv_heads, width), dim=-1)
        centre, weight = k[:, :, :].nan_to_num().clamp(-100, 100).mean(0).contiguous(), torch.tensor([90.0, 5.0])
        frame = Frame(centre, aim, weight) if framed == "shaped" else Frame(centre)
        placed = PlacedFrame(frame, torch.randint(40, (tokens,)).int(), torch.cat((angles.cos(), angles.sin()), 1))
    slots = torch.randperm(32)[:tokens]
    REFERENCE.kv_write(pools[0].view(0), k, v, slots, placed)
    KvWriteOp(HeadWriter(EmulatedPrograms()), REFERENCE.kv_write)(pools[1].view(0), k, v, slots, placed)
    assert torch.equal(pools[0].storage, pools[1].storage)
    if framed != "plain":
        scales = pools[1].view(0).k_scale
        assert scales is not None
        marks = scales[slots // 16, :, slots % 16, 0] & 1
        assert 0 < int(marks.sum()) < marks.numel()
