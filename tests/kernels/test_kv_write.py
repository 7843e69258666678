"""Writing keys and values: the bytes that come to lie in the pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import PER_HEAD_MODES, KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

MODES = list(PER_HEAD_MODES)


def make_pool(mode: KVMode, k_dim: int = 64, v_dim: int = 40, block_size: int = 16) -> KVPool:
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


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("width", [64, 40, 8], ids=lambda d: f"D{d}")
def test_stored_numbers_are_the_formats_own(kernels: KernelSet, mode: KVMode, width: int) -> None:
    pool = make_pool(mode, width, width)
    x = awkward_vectors(width).unsqueeze(1).expand(-1, 3, -1).contiguous()
    slots = torch.randperm(pool.num_slots)[: x.shape[0]]
    kernels.kv_write(pool.view(1), x, -x, slots)
    pages = pool.view(1)
    for t, slot in enumerate(slots.tolist()):
        page, place = divmod(slot, 16)
        for stored, scales, vector in ((pages.k, pages.k_scale, x[t, 2]), (pages.v, pages.v_scale, -x[t, 2])):
            got = stored[page, 2, place]
            if scales is not None:
                q, scale, zero = oracle.int8_vector(vector.numpy())
                assert got.tolist() == q.tolist()
                assert scales[page, 2, place].tolist() == [scale, zero]
            elif mode is KVMode.FLOAT16:
                assert got.tolist() == np.clip(vector.numpy(), -65504, 65504).astype(np.float16).tolist()
            else:
                assert torch.equal(got, vector.to(got.dtype))
    pool.close()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_bytes_of_a_token_do_not_depend_on_its_batch(kernels: KernelSet, mode: KVMode) -> None:
    k, v, slots = torch.randn(50, 3, 64), torch.randn(50, 3, 40), torch.randperm(96)[:50]
    together, alone = make_pool(mode), make_pool(mode)
    kernels.kv_write(together.view(0), k, v, slots)
    for t in range(50):
        kernels.kv_write(alone.view(0), k[t : t + 1], v[t : t + 1], slots[t : t + 1])
    assert torch.equal(together.storage, alone.storage)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_only_the_named_slots_are_written(kernels: KernelSet, mode: KVMode) -> None:
    pool = make_pool(mode)
    pool.storage.fill_(0xA5)
    slots = torch.tensor([17, -1, 5])
    kernels.kv_write(pool.view(1), torch.randn(3, 3, 64), torch.randn(3, 3, 40), slots)
    written = (pool.storage != 0xA5).nonzero()
    assert set(written[:, 0].tolist()) == {0, 1}
    layout = pool.layout
    low, high = layout.layer_bytes_per_block, 2 * layout.layer_bytes_per_block
    assert int(written[:, 1].min()) >= low
    assert int(written[:, 1].max()) < high
    assert written.shape[0] <= 2 * layout.layer_bytes_per_token


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_views_of_a_wider_buffer_are_written_as_they_are(kernels: KernelSet, mode: KVMode) -> None:
    qkv = torch.randn(4, 9 * 64 + 3 * 64 + 3 * 40)
    k, v = qkv[:, 576:768].view(4, 3, 64), qkv[:, 768:].view(4, 3, 40)
    strided, dense = make_pool(mode), make_pool(mode)
    kernels.kv_write(strided.view(0), k, v, torch.arange(4))
    kernels.kv_write(dense.view(0), k.contiguous(), v.contiguous(), torch.arange(4))
    assert torch.equal(strided.storage, dense.storage)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_a_nan_reads_back_as_nan(kernels: KernelSet, mode: KVMode) -> None:
    pool = make_pool(mode)
    k = torch.randn(2, 3, 64)
    k[0, 1, 7] = float("nan")
    kernels.kv_write(pool.view(0), k, torch.randn(2, 3, 40), torch.tensor([3, 4]))
    stored, _ = pool.read(0, torch.tensor([3, 4]))
    assert bool(stored[0, 1, 7].isnan())
    assert not bool(stored[0, [0, 2]].isnan().any())
    assert not bool(stored[1].isnan().any())


def test_a_slot_beyond_the_pool_is_refused(kernels: KernelSet) -> None:
    pool = make_pool(KVMode.FLOAT32)
    with pytest.raises(GenerationError, match="got slot 96, expected below 96"):
        kernels.kv_write(pool.view(0), torch.randn(1, 3, 64), torch.randn(1, 3, 40), torch.tensor([96]))
    with pytest.raises(GenerationError, match="kv_write: got v"):
        kernels.kv_write(pool.view(0), torch.randn(1, 3, 64), torch.randn(1, 3, 64), torch.tensor([0]))
