"""Writing latents: the bytes that come to lie in the pages, and how far what is read back may be off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import latents as oracle

from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.latent_format import error_bound
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

EVERY_MODE = pytest.mark.parametrize("mode", list(KVMode), ids=lambda m: m.value)
QUANTISED = {KVMode.INT8: oracle.int8, KVMode.FP8: oracle.fp8, KVMode.INT4: oracle.int4}


def make_pool(mode: KVMode, rank: int = 64, rope_dim: int = 10, block_size: int = 16) -> KVPool:
    return KVPool(LatentLayout(2, rank, rope_dim, mode, block_size), 6)


def awkward_latents(width: int) -> torch.Tensor:
    """Rows that quantisers trip over: constant, zero, one outlier, a common offset, beyond float16, tiny, ties."""
    noise = torch.randn(10, width)
    noise[1] = 7.123
    noise[2] = 0.0
    noise[3, 5] = 1e4
    noise[4] = 3 + 0.01 * noise[4]
    noise[5] *= 1e30
    noise[6] *= 1e-9
    noise[7] = -65504.0
    noise[8] *= torch.logspace(-3, 1, width)
    noise[9] = torch.arange(width) % 5 * 0.5 - 1.0
    return noise


@EVERY_MODE
@pytest.mark.parametrize("rank", [64, 48, 128, 512], ids=lambda r: f"R{r}")
def test_stored_numbers_are_the_formats_own(kernels: KernelSet, mode: KVMode, rank: int) -> None:
    if kernels.name == "reference" and rank > 64:
        pytest.skip("what it adds is in the small one")
    pool = make_pool(mode, rank)
    x, rope = awkward_latents(rank), awkward_latents(10)
    slots = torch.randperm(pool.num_slots)[: x.shape[0]]
    kernels.latent_write(pool.latents(1), x, rope, slots)
    pages = pool.latents(1)
    for t, slot in enumerate(slots.tolist()):
        page, place = divmod(slot, 16)
        limit = 65504.0 if pages.rope.dtype == torch.float16 else torch.inf
        assert torch.equal(pages.rope[page, place], rope[t].clamp(-limit, limit).to(pages.rope.dtype))
        if mode not in QUANTISED:
            assert torch.equal(pages.latent[page, place], x[t].clamp(-limit, limit).to(pages.latent.dtype))
            continue
        assert pages.scale is not None
        groups = np.clip(x[t].numpy(), -65504, 65504).reshape(-1, pages.group)
        codes, scales = zip(*(QUANTISED[mode](group) for group in groups), strict=True)
        assert pages.latent[page, place].tolist() == [c for group in codes for c in group]
        assert pages.scale[page, place].tolist() == list(scales)


@EVERY_MODE
def test_what_is_read_back_lies_within_the_stated_bound(kernels: KernelSet, mode: KVMode) -> None:
    pool = make_pool(mode, 512)
    x = torch.randn(64, 512) * torch.randn(512).exp()
    x[:10] = awkward_latents(512).clamp(-65504, 65504)
    kernels.latent_write(pool.latents(0), x, torch.randn(64, 10), torch.arange(64))
    group = pool.latents(0).group
    off = (pool.read_latents(0, torch.arange(64))[0].double() - x.double()).view(64, -1, group)
    seen = off.norm(dim=-1) if mode is KVMode.INT4 else off.abs().amax(-1)
    assert bool((seen <= error_bound(x, mode.value, group)).all())


# Error over size, of all elements together: a step of 1/127 of the largest of 128 (about 2.7 standard deviations) is
# 0.021 wide and off by 0.29 of itself; FP8 keeps 4 bits of each element (off by 2^-4 at most, 0.026 on average);
# INT4's levels have 22 dB. Channels of very different size cost the plain INT8 more, the rotated INT4 nothing.
@pytest.mark.parametrize(
    ("mode", "even", "uneven"), [(KVMode.INT8, 0.0070, 0.02), (KVMode.FP8, 0.027, 0.027), (KVMode.INT4, 0.080, 0.080)]
)
def test_the_usual_error_of_a_quantised_latent(
    native_exact: KernelSet, mode: KVMode, even: float, uneven: float
) -> None:
    channels = torch.ones(512)
    channels[torch.randperm(512)[:6]] = 15.0
    for weight, most in ((torch.ones(512), even), (torch.randn(512).exp(), uneven), (channels, uneven)):
        pool = make_pool(mode, 512)
        x = torch.randn(96, 512) * weight
        native_exact.latent_write(pool.latents(0), x, torch.randn(96, 10), torch.arange(96))
        assert float((pool.read_latents(0, torch.arange(96))[0] - x).norm() / x.norm()) <= most


def test_a_token_of_deepseek_takes_these_bytes() -> None:
    layout = LatentLayout(1, 512, 64, KVMode.BFLOAT16)
    sizes = {mode: layout.with_mode(mode).layer_bytes_per_token for mode in KVMode}
    assert sizes == {
        KVMode.FLOAT32: 2304, KVMode.BFLOAT16: 1152, KVMode.FLOAT16: 1152, KVMode.FP8: 648, KVMode.INT8: 648,
        KVMode.INT4: 400,
    }  # fmt: skip


@EVERY_MODE
def test_a_token_has_the_same_bytes_alone_and_in_a_batch(kernels: KernelSet, mode: KVMode) -> None:
    x, rope, slots = torch.randn(40, 64), torch.randn(40, 10), torch.randperm(96)[:40]
    together, alone = make_pool(mode), make_pool(mode)
    kernels.latent_write(together.latents(0), x, rope, slots)
    for t in range(40):
        kernels.latent_write(alone.latents(0), x[t : t + 1], rope[t : t + 1], slots[t : t + 1])
    assert torch.equal(together.storage, alone.storage)


@EVERY_MODE
def test_only_the_named_slots_are_written(kernels: KernelSet, mode: KVMode) -> None:
    pool = make_pool(mode)
    pool.storage.fill_(0xA5)
    kernels.latent_write(pool.latents(1), torch.randn(3, 64), torch.randn(3, 10), torch.tensor([17, -1, 5]))
    written = (pool.storage != 0xA5).nonzero()
    assert set(written[:, 0].tolist()) == {0, 1}
    layout = pool.layout
    assert int(written[:, 1].min()) >= layout.layer_bytes_per_block
    assert int(written[:, 1].max()) < 2 * layout.layer_bytes_per_block
    assert layout.layer_bytes_per_token < written.shape[0] <= 2 * layout.layer_bytes_per_token


@EVERY_MODE
def test_views_of_a_wider_buffer_are_written_as_they_are(kernels: KernelSet, mode: KVMode) -> None:
    down = torch.randn(4, 100)
    latent, rope = down[:, 20:84], down[:, 84:94]
    strided, dense = make_pool(mode), make_pool(mode)
    kernels.latent_write(strided.latents(0), latent, rope, torch.arange(4))
    kernels.latent_write(dense.latents(0), latent.contiguous(), rope.contiguous(), torch.arange(4))
    assert torch.equal(strided.storage, dense.storage)


@EVERY_MODE
def test_a_nan_reads_back_as_nan(kernels: KernelSet, mode: KVMode) -> None:
    pool = make_pool(mode)
    x, rope = torch.randn(2, 64), torch.randn(2, 10)
    x[0, 7] = rope[1, 3] = float("nan")
    kernels.latent_write(pool.latents(0), x, rope, torch.tensor([3, 4]))
    latent, rotary = pool.read_latents(0, torch.tensor([3, 4]))
    assert bool(latent[0, 7].isnan())
    assert not bool(latent[1].isnan().any())
    assert rotary.isnan().nonzero().tolist() == [[1, 3]]


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    pages = make_pool(KVMode.INT4).latents(0)
    x, rope = torch.randn(1, 64), torch.randn(1, 10)
    with pytest.raises(GenerationError, match="got slot 96, expected below 96"):
        kernels.latent_write(pages, x, rope, torch.tensor([96]))
    with pytest.raises(GenerationError, match="latent_write: got rope"):
        kernels.latent_write(pages, x, x, torch.tensor([0]))
