"""The pool: where sections lie, what is read back, and what integrity means."""

from __future__ import annotations

import os

import pytest
import torch

from deepseek_tgi.errors import ConfigError, GenerationError, ResourceError
from deepseek_tgi.kv.layout import PAGE_ALIGNMENT_BYTES, KVLayout, KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

LAYOUTS = [
    KVLayout(3, 2, *((64, 32) if mode is KVMode.INT4 else (24, 8)), mode, size) for mode in KVMode for size in (16, 48)
]
IDS = [f"{layout.mode.value}-S{layout.block_size}" for layout in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_pages_start_on_page_boundaries(layout: KVLayout) -> None:
    pool = KVPool(layout, 5)
    assert pool.storage.data_ptr() % PAGE_ALIGNMENT_BYTES == 0
    assert pool.storage.stride(0) % PAGE_ALIGNMENT_BYTES == 0
    assert (pool.num_slots, pool.nbytes) == (5 * layout.block_size, pool.storage.numel())


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_sections_of_all_layers_cover_a_page_without_overlap(layout: KVLayout) -> None:
    pool = KVPool(layout, 2)
    marks = torch.zeros(layout.bytes_per_block, dtype=torch.int32)
    for layer in range(layout.num_layers):
        for name in ("k", "v", "k_scale", "v_scale"):
            view = getattr(pool.view(layer), name)
            if view is None:
                continue
            pool.storage.zero_()
            view.view(torch.uint8)[1].fill_(1)
            assert not pool.storage[0].any()
            marks += pool.storage[1]
    used = layout.num_layers * layout.layer_bytes_per_block
    assert bool((marks[:used] == 1).all())
    assert not bool(marks[used:].any())


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_views_have_the_layouts_shapes_and_are_made_once(layout: KVLayout) -> None:
    pool = KVPool(layout, 5)
    pages = pool.view(1)
    assert pages is pool.view(1)
    per_item = 2 if layout.mode is KVMode.INT4 else 1
    assert tuple(pages.k.shape) == (5, 2, layout.block_size, layout.k_dim // per_item)
    assert tuple(pages.v.shape) == (5, 2, layout.block_size, layout.v_dim // per_item)
    assert (pages.num_heads, pages.k_dim, pages.v_dim) == (2, layout.k_dim, layout.v_dim)
    assert pages.quantised == layout.mode.quantised
    assert pages.num_slots == pool.num_slots


def test_reading_dequantises_by_hand_worked_numbers() -> None:
    pool = KVPool(KVLayout(1, 1, 2, 1, KVMode.INT8), 2)
    pages = pool.view(0)
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    pages.k[1, 0, 3] = torch.tensor([0, 255], dtype=torch.uint8)
    pages.k_scale[1, 0, 3] = torch.tensor([0.5, -2.0], dtype=torch.float16)
    pages.v[1, 0, 3] = 4
    pages.v_scale[1, 0, 3] = torch.tensor([0.25, 1.0], dtype=torch.float16)
    k, v = pool.read(0, torch.tensor([19]))
    assert k.tolist() == [[[-2.0, 125.5]]]
    assert v.tolist() == [[[2.0]]]


def test_low_bit_heads_are_read_by_hand_worked_numbers() -> None:
    pool = KVPool(KVLayout(1, 1, 32, 32, KVMode.FP8), 2)
    pages = pool.view(0)
    assert pages.k_scale is not None
    pages.k[1, 0, 3], pages.k_scale[1, 0, 3] = 0x38, 0.5  # 1 in E4M3
    assert pool.read(0, torch.tensor([19]))[0].tolist() == [[[0.5] * 32]]
    pool = KVPool(KVLayout(1, 1, 32, 32, KVMode.INT4), 2)
    pages = pool.view(0)
    assert pages.k_scale is not None
    # Scale 0x3C00 / 64 = 1 / 64. Levels are 6 at element 0 and -6, code 7, elsewhere: 12 at element 0 over a common -6,
    # whose rotation is -6 * 32 at element 0 and 0 elsewhere, over 2^3.
    pages.k[1, 0, 3], pages.k_scale[1, 0, 3] = 0x77, 0x3C00 >> 7
    pages.k[1, 0, 3, 0] = 0x78
    assert pool.read(0, torch.tensor([19]))[0].tolist() == [[[(12 - 192) / 512, *[12 / 512] * 31]]]


def test_head_sizes_that_int4_cannot_hold_are_refused_by_name() -> None:
    for size in (40, 288):
        with pytest.raises(ConfigError, match=f"got int4 with heads of {size} elements, expected a multiple of 32"):
            KVLayout(1, 1, 64, size, KVMode.INT4)
    assert KVLayout(1, 1, 40, 40, KVMode.FP8).bytes_per_token == 2 * 42


def test_memory_is_taken_only_as_pages_are_written() -> None:
    layout = KVLayout(4, 4, 64, 64, KVMode.FLOAT32)
    pool = KVPool(layout, (1 << 34) // layout.bytes_per_block)  # 16 GiB of addresses
    pool.view(0).k[-1, 0, 0] = 1.0
    assert float(pool.read(0, torch.tensor([pool.num_slots - layout.block_size]))[0][0, 0, 0]) == 1.0


def test_integrity_holds_for_a_fresh_pool_and_names_a_moved_view() -> None:
    layout = KVLayout(2, 2, 16, 16, KVMode.INT8)
    pool, other = KVPool(layout, 3), KVPool(layout, 3)
    pool.check_integrity()
    pool._views[1] = other.view(1)
    with pytest.raises(GenerationError, match="layer 1 k lies at byte"):
        pool.check_integrity()


def test_a_closed_pool_is_refused() -> None:
    pool = KVPool(LAYOUTS[0], 2)
    pool.close()
    for use in (lambda: pool.view(0), pool.check_integrity):
        with pytest.raises(GenerationError, match="after close"):
            use()


@pytest.mark.parametrize("blocks", [0, -1, 1 << 50])
def test_a_pool_that_cannot_be_had_is_refused(blocks: int) -> None:
    with pytest.raises(ResourceError, match="KV pool"):
        KVPool(LAYOUTS[0], blocks)


@pytest.mark.parametrize("mode", list(KVMode), ids=lambda m: m.value)
def test_latents_of_a_page_lie_beside_each_other_without_overlap(mode: KVMode) -> None:
    layout = LatentLayout(2, 96, 6, mode, 32)
    pool = KVPool(layout, 3)
    pool.check_integrity()
    marks = torch.zeros(layout.bytes_per_block, dtype=torch.int32)
    for layer in range(2):
        pages = pool.latents(layer)
        assert pages is pool.latents(layer)
        assert (pages.rank, pages.rope_dim, pages.num_slots) == (96, 6, 96)
        for view in (pages.latent, pages.rope, pages.scale):
            if view is None:
                continue
            pool.storage.zero_()
            view.view(torch.uint8)[1].fill_(1)
            assert not pool.storage[[0, 2]].any()
            marks += pool.storage[1]
    used = 2 * layout.layer_bytes_per_block
    assert bool((marks[:used] == 1).all())
    assert not bool(marks[used:].any())


def test_reading_latents_dequantises_by_hand_worked_numbers() -> None:
    slot, expected_rope = torch.tensor([19]), torch.tensor([[1.5, -0.25]])
    for mode in (KVMode.INT8, KVMode.FP8, KVMode.INT4):
        pool = KVPool(LatentLayout(1, 16, 2, mode), 2)
        pages = pool.latents(0)
        assert pages.scale is not None
        pages.rope[1, 3] = expected_rope[0].to(torch.bfloat16)
        if mode is KVMode.INT4:
            # Scale 0x3C00 / 64 = 1 / 64. Levels are 6 at element 0 and -6, code 7, elsewhere: 12 at element 0 over a
            # common -6, whose rotation is -6 * 16 at element 0 and 0 elsewhere, before signs turn.
            pages.latent[1, 3], pages.scale[1, 3] = 0x77, 0x3C00 >> 7
            pages.latent[1, 3, 0] = 0x78
            signs = torch.tensor([-1.0 if i in {3, 7, 11, 12, 13, 14} else 1.0 for i in range(16)])
            expected = torch.tensor([12.0 - 96.0, *[12.0] * 15]) * signs / 64
        else:
            pages.scale[1, 3] = 0.5
            pages.latent[1, 3] = 0x38 if mode is KVMode.FP8 else 0xFF  # 1 in E4M3, -1 in two's complement
            expected = torch.full((16,), 0.5 if mode is KVMode.FP8 else -0.5)
        latent, rope = pool.read_latents(0, slot)
        assert torch.equal(latent, expected.unsqueeze(0))
        assert torch.equal(rope, expected_rope)


def test_a_rank_that_kernels_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank: got 40, expected a multiple of 16"):
        LatentLayout(1, 40, 2, KVMode.BFLOAT16)


@pytest.mark.parametrize("size", [16, 48])
def test_discarded_blocks_give_their_memory_back_and_are_promised_to_nobody(size: int) -> None:
    pool = KVPool(KVLayout(2, 2, 64, 64, KVMode.FLOAT32, size), 40)
    each = pool.layout.bytes_per_block
    assert pool.untouched_bytes() == pool.nbytes
    pool.storage.fill_(7)
    assert pool.untouched_bytes() == 0
    before = resident_bytes()
    freed = pool.discard(range(10, 40))
    assert freed == 30 * each
    assert before - resident_bytes() > 0.9 * freed
    assert pool.untouched_bytes() == 0, "what was given back is promised to nobody"
    assert bool((pool.storage[:10] == 7).all())
    assert not pool.storage[10:].any()
    pool.storage[10:].fill_(9)
    pool.discard([])
    assert pool.untouched_bytes() == 0
    assert bool((pool.storage[10:] == 9).all())


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
