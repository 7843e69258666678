"""Latent attention's CUDA kernels, emulated: against the formulas and formats in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulation.emulated import EmulatedPrograms
from oracles import latents as oracle

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.latent_attention import expanded
from deepseek_tgi.kernels.latent_attention.cuda import CudaLatentAttention, CudaUp
from deepseek_tgi.kernels.latent_attention.decode import HOPPER, MODES, RANK, ROPE, LatentDecode
from deepseek_tgi.kernels.latent_attention.expanded import ExpandedAttention
from deepseek_tgi.kernels.latent_attention.plain import read_context
from deepseek_tgi.kernels.latent_prepare.cuda import CudaLatentPrepare, CudaLatentWrite
from deepseek_tgi.kernels.latent_write.cpu import latent_write
from deepseek_tgi.kernels.latent_write.plain import latent_write as plain_write
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

NOPE, VALUE = 32, 48
SCALE = 0.08
QUANTISED = {"int8": oracle.int8, "fp8_e4m3fn": oracle.fp8, "int4": oracle.int4}
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


def step(tokens: list[int], cached: list[int], tables: torch.Tensor) -> ForwardInputs:
    """Inputs of a step whose tokens follow what is cached."""
    starts = torch.tensor([0, *np.cumsum(tokens)], dtype=torch.int32)
    nothing = torch.zeros(sum(tokens), dtype=torch.int64)
    longest = max(n + c for n, c in zip(tokens, cached, strict=True))
    lens = torch.tensor(cached, dtype=torch.int32)
    return ForwardInputs(nothing, nothing.int(), nothing, starts, tables, lens, nothing[:1], max(tokens), longest)


def attended(
    mode: str,
    heads: int,
    tokens: list[int],
    cached: list[int],
    *,
    block: int = 16,
    rank: int = RANK,
    form: str = "auto",
    capability: int = 0,
    tiled: bool = True,
    op: CudaLatentAttention | None = None,
) -> None:
    """Run the op on random pages and hold it against the expanded formula in float64."""
    torch.manual_seed(0)
    lengths = [n + c for n, c in zip(tokens, cached, strict=True)]
    columns = -(-max(lengths) // block)
    pool = KVPool(LatentLayout(2, rank, ROPE, KVMode(mode), block), columns * len(lengths) + 1)
    pool.storage.fill_(0xFF)  # NaN in every float format: what was not written must not be read
    tables = (torch.randperm(columns * len(lengths)) + 1).view(len(lengths), columns).int()
    weight = (torch.randn(heads * (NOPE + VALUE), rank) * rank**-0.5).bfloat16().float()
    q = torch.randn(sum(tokens), heads, ROPE + NOPE).bfloat16()
    contexts = []
    for row, length in zip(tables.long(), lengths, strict=True):
        places = torch.arange(length)
        slots = row[places // block] * block + places % block
        latent_write(pool.latents(1), torch.randn(length, rank) + 0.2, torch.randn(length, ROPE), slots)
        contexts.append(pool.read_latents(1, slots))
    out = torch.full((sum(tokens), heads, VALUE), float("nan"), dtype=torch.bfloat16)
    inputs, up = step(tokens, cached, tables), CudaUp(weight, heads, NOPE)
    op = op or emulated(capability, tiled=tiled)
    op(q, pool.latents(1), up, inputs, scale=SCALE, out=out, form=form)
    first = 0
    for n, c, (latent, rope) in zip(tokens, cached, contexts, strict=True):
        rows = q[first : first + n].float().numpy()
        wanted = oracle.attention(
            rows, latent.float().numpy(), rope.float().numpy(), weight.view(heads, -1, rank).numpy(), c, SCALE
        )
        error = np.linalg.norm(out[first : first + n].float().numpy() - wanted) / np.linalg.norm(wanted)
        # Queries, weights and sums are rounded to bfloat16 one after the other.
        assert error < 1e-2, (n, c, error)
        first += n


def emulated(capability: int = 0, *, tiled: bool = True) -> CudaLatentAttention:
    """The op over emulated kernels."""
    programs = EmulatedPrograms()
    return CudaLatentAttention(
        LatentDecode(programs, 2, capability), ExpandedAttention(programs, capability, interpreted=True, tiled=tiled)
    )


@EVERY_MODE
def test_a_decode_step_is_the_formula(mode: str) -> None:
    attended(mode, 5, [1, 1], [0, 69], block=48)


@EVERY_MODE
def test_many_heads_on_hopper(mode: str) -> None:
    attended(mode, 50, [1, 1], [0, 100], block=48, capability=HOPPER)


def test_more_heads_than_a_tile_and_more_requests_than_blocks() -> None:
    attended("int8", 17, [1] * 4, [3, 0, 33, 17])


@pytest.mark.parametrize("batch", [5, 16, 37])  # a tile of tokens, cut short or not, and some tiles
def test_products_around_attention_of_several_requests(batch: int) -> None:
    heads, nope, value = 3, 64, 48
    g = torch.Generator().manual_seed(batch)
    up = CudaUp(torch.randn(heads * (nope + value), RANK, generator=g) * RANK**-0.5, heads, nope)
    q = torch.randn(batch, heads, ROPE + nope, generator=g).bfloat16()
    decode = LatentDecode(EmulatedPrograms(), 2)
    latent = decode.queries(q.transpose(0, 1)[..., ROPE:], up.rows)
    wanted = torch.einsum("bhn,hnr->hbr", q[..., ROPE:].double(), up.keys.double())
    assert latent.shape == (heads, batch, RANK)
    assert (latent.double() - wanted).abs().max() < wanted.abs().max() * 2**-8
    out = torch.full((batch, heads, value), float("nan"), dtype=torch.bfloat16)
    decode.values(latent, up.rows, out)
    wanted = torch.einsum("hbr,hvr->bhv", latent.double(), up.values.double())
    assert (out.double() - wanted).abs().max() < wanted.abs().max() * 2**-8
    alone = torch.empty(1, heads, value, dtype=torch.bfloat16)
    decode.values(decode.queries(q[4:5].transpose(0, 1)[..., ROPE:], up.rows), up.rows, alone)
    assert torch.equal(alone[0], out[4])


def test_a_step_of_several_requests_is_the_formula() -> None:
    attended("int8", 3, [1] * 5, [3, 0, 33, 17, 60])


def test_heads_that_no_kernel_multiplies_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.NOPE", 16)
    monkeypatch.setattr(f"{__name__}.VALUE", 24)
    attended("int8", 3, [1, 1], [3, 20])


@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
def test_prompts_chunks_and_single_tokens_share_a_step(form: str) -> None:
    attended("int4", 3, [3, 1, 9, 4], [18, 20, 0, 0], form=form)


def test_one_op_takes_steps_of_every_kind_in_turn() -> None:
    op = emulated()
    for _ in range(2):
        for mode, tokens, cached, form in (
            ("int8", [3, 1, 1, 9], [18, 20, 31, 0], "auto"), ("int8", [3, 1, 1, 9], [18, 20, 31, 0], "absorbed"),
            ("int8", [1, 1, 3, 9], [40, 20, 3, 5], "auto"), ("int4", [1, 12], [33, 0], "auto"),
            ("bfloat16", [14], [7], "expanded"), ("int8", [1, 1], [5, 9], "auto"),
        ):  # fmt: skip
            attended(mode, 3, tokens, cached, form=form, op=op)


def test_lengths_and_tables_that_change_in_place_are_read_as_they_are() -> None:
    torch.manual_seed(0)
    pool = KVPool(LatentLayout(1, RANK, ROPE, KVMode.INT8), 9)
    latent_write(pool.latents(0), torch.randn(9 * 16, RANK), torch.randn(9 * 16, ROPE), torch.arange(9 * 16))
    up = CudaUp(torch.randn(3 * (NOPE + VALUE), RANK) * RANK**-0.5, 3, NOPE)
    q, op = torch.randn(8, 3, ROPE + NOPE).bfloat16(), emulated()
    inputs = step([6, 1, 1], [9, 30, 20], torch.arange(1, 7, dtype=torch.int32).view(3, 2))

    def run(own: CudaLatentAttention) -> torch.Tensor:
        out = torch.full((8, 3, VALUE), float("nan"), dtype=torch.bfloat16)
        return own(q, pool.latents(0), up, inputs, scale=SCALE, out=out)

    before = run(op)
    inputs.block_tables.copy_(inputs.block_tables.flip(0))
    inputs.cache_lens.copy_(torch.tensor([4, 11, 25]))
    after = run(op)
    assert torch.equal(after, run(emulated()))
    assert all(not torch.equal(after[rows], before[rows]) for rows in (slice(6), slice(6, 7), slice(7, 8)))


@EVERY_MODE
def test_a_prompt_after_a_cached_prefix_is_the_formula(mode: str) -> None:
    for capability in (0, HOPPER):
        attended(mode, 3, [7, 140], [0, 30], block=48, form="expanded", capability=capability)


def test_torchs_attention_does_where_there_is_no_triton() -> None:
    attended("int8", 3, [7, 5], [0, 30], form="expanded", tiled=False)


def test_heads_beyond_what_is_expanded_at_once_take_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "ELEMENTS_AT_ONCE", 2 * 25 * (NOPE + VALUE))
    attended("int8", 5, [7], [18], form="expanded")


@EVERY_MODE
def test_a_context_leaves_its_pages_as_torchs_operators_read_it(mode: str) -> None:
    length = 70
    pool = KVPool(LatentLayout(2, RANK, ROPE, KVMode(mode), 32), 6)
    pool.storage.fill_(0xFF)
    table = torch.tensor([4, 1, 5], dtype=torch.int32)
    slots = table.long()[torch.arange(length) // 32] * 32 + torch.arange(length) % 32
    latent_write(pool.latents(1), torch.randn(length, RANK), torch.randn(length, ROPE), slots)
    latent, rope = expanded.ExpandedAttention(EmulatedPrograms())._context(pool.latents(1), table, length)
    wanted, key = read_context(pool.latents(1), table, length, torch.bfloat16)
    assert torch.equal(latent, wanted)
    assert torch.equal(rope, key)


@EVERY_MODE
def test_latents_that_no_kernel_reads_are_attended_all_the_same(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    op = emulated()
    attended(mode, 3, [1, 1], [0, 20], rank=48, op=op)
    attended(mode, 3, [4, 1], [5, 20], rank=48, op=op)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    sizes = f"latents of 48 and rotary keys of {ROPE} elements (512 and 64 are wanted)"
    assert said == [f"latent_attention: no CUDA kernel for {sizes}; torch does the work, which is slower"]


def test_one_up_projection_serves_pages_of_either_kind() -> None:
    weight = torch.randn(2 * (NOPE + VALUE), 64).bfloat16()
    up = CudaUp(weight, 2, NOPE)
    kept, place = up.rows.clone(), up.rows.data_ptr()
    pages = [KVPool(LatentLayout(1, 64, ROPE, mode), 1).latents(0) for mode in (KVMode.INT4, KVMode.INT8)]
    up.turn_for(pages[0])
    exact = oracle.rotated(weight[0, :32].float().numpy()) * 32
    assert np.allclose(up.rows[0, 0, :32].float().numpy(), exact, rtol=2**-8)
    up.turn_for(pages[1])
    assert up.rows.data_ptr() == place
    assert torch.allclose(up.rows.float(), kept.float(), rtol=0, atol=0.05)


def awkward(width: int) -> torch.Tensor:
    """Rows that quantisers trip over: constant, zero, one outlier, a common offset, huge, tiny, ties, NaN."""
    rows = torch.randn(9, width)
    rows[1] = 7.123
    rows[2] = 0.0
    rows[3, 5] = 1e4
    rows[4] = 3 + 0.01 * rows[4]
    rows[5] *= 1e30
    rows[6] *= 1e-9
    rows[7] = torch.arange(width) % 5 * 0.5 - 1.0
    rows[8, 40] = float("nan")
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EVERY_MODE
def test_stored_numbers_are_the_formats_own(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = KVPool(LatentLayout(2, RANK, ROPE, KVMode(mode)), 3)
    before = pool.storage.fill_(0xEE).clone()
    x, rope = awkward(RANK).to(dtype), awkward(ROPE).to(dtype)
    slots = torch.randperm(pool.num_slots)[: len(x)]
    slots[4] = -1
    pages = pool.latents(1)
    CudaLatentWrite(EmulatedPrograms())(pages, x, rope, slots)
    for t, slot in enumerate(slots.tolist()):
        if slot < 0 or t == len(x) - 1:
            continue
        page, place = divmod(slot, 16)
        limit = 65504.0 if mode == "float16" else torch.inf
        assert torch.equal(pages.rope[page, place], rope[t].float().clamp(-limit, limit).to(pages.rope.dtype))
        if mode not in QUANTISED:
            assert torch.equal(pages.latent[page, place], x[t].float().clamp(-limit, limit).to(pages.latent.dtype))
            continue
        assert pages.scale is not None
        groups = np.clip(x[t].float().numpy(), -65504, 65504).reshape(-1, pages.group)
        codes, scales = zip(*(QUANTISED[mode](group) for group in groups), strict=True)
        assert pages.latent[page, place].tolist() == [c for group in codes for c in group]
        assert pages.scale[page, place].tolist() == list(scales)
    spoilt = pool.read_latents(1, slots[-1:])[0][0].isnan()
    assert spoilt[40]
    assert not spoilt[128:].any()
    # Nothing but the slots was touched: with them as they were, all is as it was.
    for store in (pages.latent, pages.rope, pages.scale):
        if store is not None:
            rows = store.view(torch.uint8).flatten(2) if store.dtype != torch.uint8 else store
            rows[slots.clamp(min=0)[slots >= 0] // 16, slots[slots >= 0] % 16] = 0xEE
    assert torch.equal(pool.storage, before)


@EVERY_MODE
def test_writing_without_a_kernel_skips_as_well(mode: str) -> None:
    torch.manual_seed(0)
    kernel, plain = (KVPool(LatentLayout(1, 48, ROPE, KVMode(mode)), 2) for _ in range(2))
    x, rope = torch.randn(4, 48), torch.randn(4, ROPE)
    for slots in (torch.tensor([-1, 7, -1, 20]), torch.tensor([-1, -1, -1, -1])):
        latent_write(kernel.latents(0), x, rope, slots)
        plain_write(plain.latents(0), x, rope, slots)
        assert torch.equal(kernel.storage, plain.storage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["bfloat16", "int8"])
def test_preparing_is_norm_rotation_and_writing(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, tokens, width = 3, 4, ROPE + NOPE
    rows = torch.randn(tokens, heads * width + RANK + ROPE).to(dtype)
    given = rows.double().numpy()
    q = rows[:, : heads * width].view(tokens, heads, width)
    latent, rope = rows[:, -RANK - ROPE : -ROPE], rows[:, -ROPE:]
    angles = torch.rand(50, ROPE // 2) * 6
    inputs = replace(
        step([1] * tokens, [0] * tokens, torch.zeros(tokens, 1, dtype=torch.int32)),
        slots=torch.tensor([5, -1, 30, 0]), positions=torch.tensor([3, 49, 0, 7], dtype=torch.int32),
    )  # fmt: skip
    pool = KVPool(LatentLayout(1, RANK, ROPE, KVMode(mode)), 2)
    write = CudaLatentWrite(EmulatedPrograms())
    weight = torch.rand(RANK) + 0.5
    CudaLatentPrepare(write, never)(
        q, latent, rope, pool.latents(0), inputs, norm_weight=weight, eps=1e-6,
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1),
    )  # fmt: skip
    old = given[:, -RANK - ROPE : -ROPE]
    normed = old / np.sqrt((old**2).mean(1, keepdims=True) + 1e-6) * weight.double().numpy()
    step_size = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-21
    assert np.allclose(latent.double().numpy(), normed, rtol=step_size, atol=1e-6)
    turns = np.exp(1j * angles.double().numpy()[inputs.positions.numpy()])
    for got, start in [(rope, given.shape[1] - ROPE), *((q[:, h, :ROPE], h * width) for h in range(heads))]:
        pair = given[:, start : start + ROPE // 2] + 1j * given[:, start + ROPE // 2 : start + ROPE]
        wanted = np.concatenate(((pair * turns).real, (pair * turns).imag), 1)
        assert np.allclose(got.double().numpy(), wanted, rtol=step_size, atol=1e-6)
    for h in range(heads):
        assert np.array_equal(q[:, h, ROPE:].double().numpy(), given[:, h * width + ROPE : (h + 1) * width])
    apart = KVPool(LatentLayout(1, RANK, ROPE, KVMode(mode)), 2)
    latent_write(apart.latents(0), latent, rope, inputs.slots)
    assert torch.equal(pool.storage, apart.storage)


def test_operands_of_another_shape_are_looked_at_again() -> None:
    pool = KVPool(LatentLayout(2, RANK, ROPE, KVMode.INT8), 2)
    prepare = CudaLatentPrepare(CudaLatentWrite(EmulatedPrograms()), never)
    q, latent, rope = torch.randn(2, 3, ROPE + NOPE), torch.randn(2, RANK), torch.randn(2, ROPE)
    inputs = replace(step([1, 1], [0, 0], torch.zeros(2, 1, dtype=torch.int32)), slots=torch.tensor([5, -1]))
    table = torch.rand(8, ROPE)
    for layer in (0, 1):
        args = q, latent, rope, pool.latents(layer), inputs
        prepare(*args, norm_weight=torch.ones(RANK), eps=1e-6, cos_sin=table)
    with pytest.raises(GenerationError, match="rms_norm: got weight"):
        prepare(*args, norm_weight=torch.ones(RANK - 1), eps=1e-6, cos_sin=table)
    with pytest.raises(GenerationError, match="latent_prepare: norm_weight"):
        prepare(*args, norm_weight=torch.ones(2 * RANK)[::2], eps=1e-6, cos_sin=table)
    with pytest.raises(GenerationError, match="rope: got positions"):
        prepare(*args[:4], replace(inputs, positions=torch.zeros(3, dtype=torch.int32)), norm_weight=torch.ones(RANK),
                eps=1e-6, cos_sin=table)  # fmt: skip


def never(*args: object, **kwargs: object) -> None:
    raise AssertionError("the kernel does it")
