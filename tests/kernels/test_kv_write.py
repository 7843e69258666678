"""Writing keys and values: the bytes that come to lie in the pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from oracles import heads
from oracles import kernels as oracle
from oracles import latents as formats

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool
from deepseek_tgi.kv.quantise import error_bound

MODES = list(KVMode)
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
LOW_BITS = pytest.mark.parametrize("mode", [KVMode.INT8, KVMode.FP8, KVMode.INT4], ids=lambda m: m.value)


def make_pool(mode: KVMode, k_dim: int = 64, v_dim: int = 32, block_size: int = 16) -> KVPool:
    return KVPool(KVLayout(2, 3, k_dim, v_dim, mode, block_size), 6)


def awkward_vectors(width: int) -> torch.Tensor:
    """Vectors that quantisers trip over: constant, zero, one outlier, large offset, beyond float16, subnormal."""
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(9, width, generator=g)
    noise[1] = 7.123
    noise[2] = 0.0
    noise[3, 5] = 1e4
    noise[4] = 100 + 0.01 * noise[4]
    noise[5] *= 1e30
    noise[6] *= 1e-9
    noise[7] = -1e-9
    noise[8] = -100 - 0.01 * noise[8]
    return noise


def expected_rows(mode: KVMode, x: np.ndarray, mark: int | None) -> tuple[Sequence[float], Sequence[float]]:
    """What one vector becomes by the format's own rules, and its scales."""
    if mode is KVMode.INT8:
        q, scale, zero = oracle.int8_vector(x)
        return q.tolist(), [scale, zero]
    x = np.clip(x, -65504, 65504)
    if mode is KVMode.FP8:
        codes, scale = formats.fp8(x)
        return codes, [scale]
    if mode is KVMode.INT4:
        codes, scales = heads.int4(heads.rotated(x), mark)
        return codes, scales
    return x.astype(np.float16).tolist(), []


@EVERY_MODE
@pytest.mark.parametrize("width", [64, 40, 8, 96, 128], ids=lambda d: f"D{d}")
def test_stored_numbers_are_the_formats_own(kernels: KernelSet, mode: KVMode, width: int) -> None:
    if mode is KVMode.INT4 and width % 32:
        pytest.skip("refused when the layout is made")
    pool = make_pool(mode, width, width)
    x = awkward_vectors(width).unsqueeze(1).expand(-1, 3, -1).contiguous()
    slots = torch.randperm(pool.num_slots)[: x.shape[0]]
    kernels.kv_write(pool.view(1), x, -x, slots)
    pages = pool.view(1)
    for t, slot in enumerate(slots.tolist()):
        page, place = divmod(slot, 16)
        for stored, scales, vector, mark in (
            (pages.k, pages.k_scale, x[t, 2], 0),
            (pages.v, pages.v_scale, -x[t, 2], None),
        ):
            got = stored[page, 2, place]
            if mode in (KVMode.FLOAT32, KVMode.BFLOAT16):
                assert torch.equal(got, vector.to(got.dtype))
                continue
            rows, numbers = expected_rows(mode, vector.numpy(), mark)
            assert got.tolist() == rows
            assert numbers == ([] if scales is None else scales[page, 2, place].tolist())
    pool.close()


@LOW_BITS
@pytest.mark.parametrize("width", [32, 64, 96, 128], ids=lambda d: f"D{d}")
def test_what_is_read_back_lies_within_the_stated_bound(kernels: KernelSet, mode: KVMode, width: int) -> None:
    pool = make_pool(mode, width, width)
    x = torch.randn(60, 3, width) * torch.randn(60, 3, 1).exp()
    largest = 4096.0 if mode is KVMode.INT4 else 65504.0
    x[:9] = awkward_vectors(width).clamp(-largest, largest).unsqueeze(1)
    kernels.kv_write(pool.view(0), x, -x, torch.arange(60))
    k, v = pool.read(0, torch.arange(60))
    for off in (k.double() - x.double(), v.double() + x.double()):
        seen = off.norm(dim=-1) if mode is KVMode.INT4 else off.abs().amax(-1)
        assert bool((seen <= error_bound(x, mode.value)).all())


@pytest.mark.parametrize("width", [32, 64, 96, 128], ids=lambda d: f"D{d}")
def test_int4_bytes_are_read_as_an_independent_reading_says(kernels: KernelSet, width: int) -> None:
    pool = make_pool(KVMode.INT4, width, width)
    x = torch.randn(20, 3, width)
    kernels.kv_write(pool.view(0), x, -x, torch.arange(20))
    k, v = pool.read(0, torch.arange(20))
    pages = pool.view(0)
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    for t in range(20):
        at = (t // 16, 1, t % 16)
        for got, codes, scales in ((k, pages.k, pages.k_scale), (v, pages.v, pages.v_scale)):
            meant = heads.unrotated(heads.int4_values(codes[at].tolist(), scales[at].tolist()))
            assert np.allclose(got[t, 1].numpy(), meant, rtol=0, atol=1e-5 * float(abs(meant).max()))


def placed(width: int, rotary: int, positions: torch.Tensor, centre: float = 40.0, shaped: bool = True) -> PlacedFrame:
    """A frame whose centre outweighs every key, and a rotation of any first elements."""
    angles = torch.arange(300).unsqueeze(1) * torch.logspace(0, -3, rotary // 2)
    aim = torch.nn.functional.normalize(torch.randn(3, width), dim=-1)
    frame = Frame(
        torch.randn(3, width) * centre, aim if shaped else None, torch.tensor([90.0, 30.0, 5.0]) if shaped else None
    )
    return PlacedFrame(frame, positions.int(), torch.cat((angles.cos(), angles.sin()), 1))


def turned(frame: PlacedFrame, x: torch.Tensor, t: int, head: int) -> np.ndarray:
    """`x [D]` rotated to the position of token t in float32, as `rope` rounds."""
    half = frame.cos_sin.shape[1] // 2
    cos, sin = (
        frame.cos_sin[int(frame.positions[t])].numpy()[:half],
        frame.cos_sin[int(frame.positions[t])].numpy()[half:],
    )
    y = x[head].numpy().copy()
    a, b = y[:half].copy(), y[half : 2 * half].copy()
    y[:half], y[half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return y


@LOW_BITS
@pytest.mark.parametrize(
    ("width", "rotary"), [(64, 64), (64, 32), (96, 96), (128, 128)], ids=["64", "64of32", "96", "128"]
)
def test_keys_in_a_frame_are_stored_without_its_centre(
    kernels: KernelSet, mode: KVMode, width: int, rotary: int
) -> None:
    pool, slots = make_pool(mode, width, width), torch.randperm(96)[:12]
    at = placed(width, rotary, torch.arange(12) * 23)
    centre, aim, weight = at.frame.centre, at.frame.aim, at.frame.weight
    assert centre is not None
    assert aim is not None
    assert weight is not None
    k = torch.stack([torch.from_numpy(np.stack([turned(at, centre, t, h) for h in range(3)])) for t in range(12)])
    k = k + torch.randn(12, 3, width)
    k[3] = torch.randn(3, width)  # not near the centre, as first tokens are
    kernels.kv_write(pool.view(0), k, k, slots, at)
    pages = pool.view(0)
    assert pages.k_scale is not None
    for t in range(12):
        page, place = divmod(int(slots[t]), 16)
        for head in range(3):
            x = k[t, head].numpy()
            got = pages.k[page, head, place].tolist(), pages.k_scale[page, head, place].tolist()
            if mode is not KVMode.INT4:
                assert got == expected_rows(mode, x - turned(at, centre, t, head), None)
                continue
            y = heads.rotated(x)
            off = y - heads.rotated(turned(at, centre, t, head))
            mark = int(heads.total(off * off) <= heads.total(y * y))
            assert mark == (t != 3)
            longer = 2.0 if int(np.log2(heads.run_length(width))) % 2 else 1.0
            shaped = heads.Aim(heads.rotated(turned(at, aim, t, head)), float(weight[head]) / longer)
            assert got == heads.int4(off if mark else y, mark, shaped)


def test_shaping_keeps_errors_off_the_direction_that_queries_look_along(kernels: KernelSet) -> None:
    # Free errors of a vector of variance 1 have 0.004 on every direction; a constant half of it is left as the last
    # group has nobody behind it to make up for its own.
    along = {}
    for shaped in (False, True):
        pool, at = make_pool(KVMode.INT4, 64, 64), placed(64, 64, torch.zeros(90), 0.0)
        aim = at.frame.aim
        assert aim is not None
        k = torch.randn(90, 3, 64)
        kernels.kv_write(pool.view(0), k, k, torch.arange(90), at if shaped else None)
        error = pool.read(0, torch.arange(90))[0] - k
        along[shaped] = float((error * aim).sum(-1).square().mean())
        assert float(error.square().mean()) < 0.0055
    assert along[True] < 0.15 * along[False]


@pytest.mark.parametrize("scale", [0.04, 0.08, 3.0])
def test_fp8_scales_of_the_checkpoint_are_what_is_written_with_and_read_with(kernels: KernelSet, scale: float) -> None:
    pool, at = make_pool(KVMode.FP8), torch.arange(5)
    half = float(torch.tensor(scale).half())
    frame = PlacedFrame(Frame(k_scale=half, v_scale=2 * half), torch.arange(5, dtype=torch.int32), torch.zeros(9, 64))
    k, v = torch.randn(5, 3, 64) * 8, torch.randn(5, 3, 32) * 8
    k[0, 0, 0], k[0, 0, 1], k[1, 1, 0], v[2, 2, 3] = 1e6, -1e6, float("inf"), float("nan")
    kernels.kv_write(pool.view(0), k, v, at, frame)
    pages = pool.view(0)
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    assert set(pages.k_scale[0, :, :5].flatten().tolist()) == {half}
    read_k, read_v = pool.read(0, at)
    limit = 448 * half
    expected = (k.clamp(-65504, 65504) / half).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(pages.k[0, :, :5].transpose(0, 1), expected.view(torch.uint8))
    assert torch.equal(read_k, expected.float() * half)
    assert (float(read_k[0, 0, 0]), float(read_k[0, 0, 1]), float(read_k[1, 1, 0])) == (limit, -limit, limit)
    assert bool(read_v[2, 2].isnan().all()), "what was NaN stays NaN"
    assert bool(read_v[[0, 1, 3, 4]].isfinite().all())


@EVERY_MODE
def test_bytes_of_a_token_do_not_depend_on_its_batch(kernels: KernelSet, mode: KVMode) -> None:
    k, v, slots = torch.randn(50, 3, 64), torch.randn(50, 3, 32), torch.randperm(96)[:50]
    together, alone = make_pool(mode), make_pool(mode)
    kernels.kv_write(together.view(0), k, v, slots)
    for t in range(50):
        kernels.kv_write(alone.view(0), k[t : t + 1], v[t : t + 1], slots[t : t + 1])
    assert torch.equal(together.storage, alone.storage)


@EVERY_MODE
def test_only_the_named_slots_are_written(kernels: KernelSet, mode: KVMode) -> None:
    pool = make_pool(mode)
    pool.storage.fill_(0xA5)
    slots = torch.tensor([17, -1, 5])
    kernels.kv_write(pool.view(1), torch.randn(3, 3, 64), torch.randn(3, 3, 32), slots)
    written = (pool.storage != 0xA5).nonzero()
    assert set(written[:, 0].tolist()) == {0, 1}
    layout = pool.layout
    low, high = layout.layer_bytes_per_block, 2 * layout.layer_bytes_per_block
    assert int(written[:, 1].min()) >= low
    assert int(written[:, 1].max()) < high
    assert written.shape[0] <= 2 * layout.layer_bytes_per_token


@EVERY_MODE
def test_views_of_a_wider_buffer_are_written_as_they_are(kernels: KernelSet, mode: KVMode) -> None:
    qkv = torch.randn(4, 9 * 64 + 3 * 64 + 3 * 32)
    k, v = qkv[:, 576:768].view(4, 3, 64), qkv[:, 768:].view(4, 3, 32)
    strided, dense = make_pool(mode), make_pool(mode)
    kernels.kv_write(strided.view(0), k, v, torch.arange(4))
    kernels.kv_write(dense.view(0), k.contiguous(), v.contiguous(), torch.arange(4))
    assert torch.equal(strided.storage, dense.storage)


@EVERY_MODE
def test_a_nan_reads_back_as_nan(kernels: KernelSet, mode: KVMode) -> None:
    pool = make_pool(mode)
    k = torch.randn(2, 3, 64)
    k[0, 1, 7] = float("nan")
    kernels.kv_write(pool.view(0), k, torch.randn(2, 3, 32), torch.tensor([3, 4]))
    stored, _ = pool.read(0, torch.tensor([3, 4]))
    assert bool(stored[0, 1, 7].isnan())
    assert not bool(stored[0, [0, 2]].isnan().any())
    assert not bool(stored[1].isnan().any())


def test_a_slot_beyond_the_pool_is_refused(kernels: KernelSet) -> None:
    pool = make_pool(KVMode.FLOAT32)
    with pytest.raises(GenerationError, match="got slot 96, expected below 96"):
        kernels.kv_write(pool.view(0), torch.randn(1, 3, 64), torch.randn(1, 3, 32), torch.tensor([96]))
    with pytest.raises(GenerationError, match="kv_write: got v"):
        kernels.kv_write(pool.view(0), torch.randn(1, 3, 64), torch.randn(1, 3, 64), torch.tensor([0]))
