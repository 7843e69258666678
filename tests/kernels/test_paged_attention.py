"""Attention over pages against the textbook formula, and the promise about batches and chunks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracles import kernels as oracle

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.qkv_attention import HeadNorms
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import KVLayout, KVMode, head_fits_int4
from deepseek_tgi.kv.pool import KVPool

# heads, KV heads, key size, value size, block size
GEOMETRIES = [(9, 3, 64, 64, 16), (4, 1, 72, 40, 32), (2, 2, 128, 128, 16), (5, 1, 24, 8, 16), (6, 2, 96, 32, 16)]
# tokens and cached tokens of each request; 16, 64 and 256 are panel and segment edges
BATCHES = [
    ([1], [0]),
    ([1, 1, 1], [15, 63, 255]),
    ([1, 1, 1], [16, 64, 256]),
    ([33, 1, 0, 17], [0, 300, 9, 250]),
    ([70], [500]),
]
EVERY_GEOMETRY = pytest.mark.parametrize(
    "geometry", GEOMETRIES, ids=lambda g: f"H{g[0]}-G{g[1]}-D{g[2]}-V{g[3]}-S{g[4]}"
)
EVERY_BATCH = pytest.mark.parametrize(
    "batch", BATCHES, ids=lambda b: "_".join(f"{n}at{c}" for n, c in zip(*b, strict=True))
)
Geometry = tuple[int, int, int, int, int]
Batch = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A filled pool, the step's inputs and queries."""

    pool: KVPool
    inputs: ForwardInputs
    q: torch.Tensor
    scale: float
    placed: PlacedFrame | None = None


def step(tokens: list[int], cached: list[int], tables: torch.Tensor, block_size: int) -> ForwardInputs:
    """Inputs of a step whose tokens follow what is cached."""
    starts = np.concatenate(([0], np.cumsum(tokens)))
    positions = [c + i for n, c in zip(tokens, cached, strict=True) for i in range(n)]
    owners = [b for b, n in enumerate(tokens) for _ in range(n)]
    slots = [
        int(tables[b, p // block_size]) * block_size + p % block_size for b, p in zip(owners, positions, strict=True)
    ]
    return ForwardInputs(
        torch.zeros(len(slots), dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        tables,
        torch.tensor(cached, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        max(tokens),
        max(n + c for n, c in zip(tokens, cached, strict=True)),
    )


def make_frame(kv_heads: int, k_dim: int, num_positions: int, g: torch.Generator) -> PlacedFrame:
    """A frame with a centre on some pairs, of which the last elements do not rotate."""
    rotary = k_dim // 4 * 4 if k_dim < 96 else k_dim - 16
    angles = torch.arange(num_positions).unsqueeze(1) * torch.logspace(0, -3, rotary // 2)
    centre = torch.randn(kv_heads, k_dim, generator=g) * (torch.rand(kv_heads, k_dim, generator=g) < 0.3)
    aim = torch.nn.functional.normalize(torch.randn(kv_heads, k_dim, generator=g), dim=-1)
    frame = Frame(centre * 8, aim, torch.full((kv_heads,), 40.0))
    return PlacedFrame(frame, torch.empty(0), torch.cat((angles.cos(), angles.sin()), 1))


def make_case(kernels: KernelSet, geometry: Geometry, batch: Batch, mode: KVMode, framed: bool = False) -> Case:
    heads, kv_heads, k_dim, v_dim, block_size = geometry
    if mode is KVMode.INT4 and not (head_fits_int4(k_dim) and head_fits_int4(v_dim)):
        pytest.skip("refused when the layout is made")
    tokens, cached = batch
    columns = max(-(-(n + c) // block_size) for n, c in zip(tokens, cached, strict=True))
    num_blocks = columns * len(tokens) + 1
    g = torch.Generator().manual_seed(len(tokens) + k_dim)
    tables = (torch.randperm(num_blocks - 1, generator=g) + 1).view(len(tokens), columns).int()
    pool = KVPool(KVLayout(2, kv_heads, k_dim, v_dim, mode, block_size), num_blocks)
    pool.storage.fill_(0xFF)  # NaN in every float format: what was not written must not be read
    placed = make_frame(kv_heads, k_dim, columns * block_size, g) if framed else None
    for b, (n, c) in enumerate(zip(tokens, cached, strict=True)):
        places = torch.arange(n + c)
        slots = tables[b, places // block_size].long() * block_size + places % block_size
        k, v = torch.randn(n + c, kv_heads, k_dim, generator=g) + 0.5, torch.randn(n + c, kv_heads, v_dim, generator=g)
        at = None if placed is None else replace(placed, positions=places.int())
        if at is not None and at.frame.centre is not None:
            k += at.turned(at.frame.centre, places)
        kernels.kv_write(pool.view(1), k, v, slots, at)
    q = torch.randn(sum(tokens), heads, k_dim, generator=g)
    return Case(pool, step(tokens, cached, tables, block_size), q, k_dim**-0.5, placed)


def kept(pool: KVPool, slots: torch.Tensor) -> torch.Tensor:
    """`[n, G]`: 1 where a key was stored without the centre."""
    scales = pool.view(1).k_scale
    if scales is None:
        return torch.zeros(len(slots), 1)
    if scales.dtype != torch.uint8:
        return torch.ones(len(slots), 1)
    size = pool.layout.block_size
    return (scales[slots // size, :, slots % size, 0] & 1).float()


def centres(placed: PlacedFrame, length: int) -> torch.Tensor:
    """The centre at positions `0:length`, in complex numbers and float64: `[length, G, D]`."""
    assert placed.frame.centre is not None
    centre, half = placed.frame.centre.double(), placed.cos_sin.shape[1] // 2
    turn = torch.complex(*placed.cos_sin[:length].double().unsqueeze(1).split(half, -1))
    spun = torch.complex(centre[:, :half], centre[:, half : 2 * half]) * turn
    return torch.cat((spun.real, spun.imag, centre[:, 2 * half :].expand(length, -1, -1)), -1)


def expected(case: Case) -> np.ndarray:
    """The formula over what the pages hold."""
    parts = []
    size = case.pool.layout.block_size
    starts, cached = case.inputs.cu_seqlens.tolist(), case.inputs.cache_lens.tolist()
    for b, blocks in enumerate(case.inputs.block_tables.long()):
        n = starts[b + 1] - starts[b]
        places = torch.arange(n + cached[b])
        slots = blocks[places // size] * size + places % size
        k, v = case.pool.read(1, slots)
        if case.placed is not None and case.placed.frame.centre is not None:
            k += kept(case.pool, slots).unsqueeze(-1) * centres(case.placed, len(places))
        parts.append(
            oracle.attention(case.q[starts[b] : starts[b + 1]].numpy(), k.numpy(), v.numpy(), cached[b], case.scale)
        )
    return np.concatenate(parts)


@EVERY_GEOMETRY
@EVERY_BATCH
@pytest.mark.parametrize("mode", list(KVMode), ids=lambda m: m.value)
def test_equals_the_formula_over_the_pages(kernels: KernelSet, geometry: Geometry, batch: Batch, mode: KVMode) -> None:
    if kernels.name == "reference" and (sum(batch[0]) > 40 or geometry != GEOMETRIES[0]):
        pytest.skip("too slow for what it adds")
    case = make_case(kernels, geometry, batch, mode)
    y = kernels.paged_attention(case.q, case.pool.view(1), case.inputs, case.scale)
    # Scores below 10 carry D additions' rounding, 1e-6, which moves weights by as much; values are below 5.
    assert np.abs(y.numpy() - expected(case)).max() <= 5e-6


@EVERY_GEOMETRY
@pytest.mark.parametrize("mode", [KVMode.FLOAT16, KVMode.INT8, KVMode.FP8, KVMode.INT4], ids=lambda m: m.value)
def test_what_was_taken_off_a_key_is_back_when_it_is_read(kernels: KernelSet, geometry: Geometry, mode: KVMode) -> None:
    if kernels.name == "reference" and geometry != GEOMETRIES[0]:
        pytest.skip("too slow for what it adds")
    case = make_case(kernels, geometry, ([5, 1, 1], [60, 255, 15]), mode, framed=True)
    y = kernels.paged_attention(case.q, case.pool.view(1), case.inputs, case.scale, placed=case.placed)
    # As above, with scores up to 60.
    assert np.abs(y.numpy() - expected(case)).max() <= 3e-5


@EVERY_GEOMETRY
@pytest.mark.parametrize("framed", [False, True], ids=["plain", "framed"])
@pytest.mark.parametrize("mode", [KVMode.FLOAT32, KVMode.INT8, KVMode.FP8, KVMode.INT4], ids=lambda m: m.value)
def test_a_query_has_the_same_bits_alone_and_in_a_batch(
    native: KernelSet, geometry: Geometry, mode: KVMode, framed: bool
) -> None:
    case = make_case(native, geometry, ([70, 1, 9], [230, 300, 250]), mode, framed)
    pages, tables = case.pool.view(1), case.inputs.block_tables
    whole = native.paged_attention(case.q, pages, case.inputs, case.scale, placed=case.placed)
    for first, request, position, n in ((0, 0, 230, 1), (25, 0, 255, 1), (26, 0, 256, 1), (69, 0, 299, 1), (70, 1, 300, 1), (10, 0, 240, 40), (71, 2, 250, 9)):  # fmt: skip  # noqa: E501
        alone = step([n], [position], tables[request : request + 1], case.pool.layout.block_size)
        y = native.paged_attention(case.q[first : first + n], pages, alone, case.scale, placed=case.placed)
        assert torch.equal(y, whole[first : first + n]), (request, position)


@pytest.mark.parametrize("mode", [KVMode.FLOAT16, KVMode.INT8, KVMode.FP8, KVMode.INT4], ids=lambda m: m.value)
def test_one_call_equals_its_parts(any_kernels: KernelSet, mode: KVMode) -> None:
    case = make_case(any_kernels, GEOMETRIES[0], ([20, 1], [0, 300]), mode)
    parts = make_case(any_kernels, GEOMETRIES[0], ([20, 1], [0, 300]), mode)
    qkv, cos_sin = torch.randn(21, 15 * 64), torch.randn(400, 64)
    norms = HeadNorms(torch.rand(64), torch.rand(64), 1e-6)
    aim = torch.nn.functional.normalize(torch.randn(3, 64), dim=-1)
    own_frame = Frame(torch.randn(3, 64) * 3, aim, torch.full((3,), 30.0), 0.0625, 0.03125)
    for head_norms, frame in ((None, None), (norms, None), (norms, own_frame)):
        results = []
        for fused, c in ((True, case), (False, parts)):
            own = qkv.clone()
            q, k, v = (own[:, a:b].view(21, -1, 64) for a, b in ((0, 576), (576, 768), (768, 960)))
            pages, out = c.pool.view(1), torch.empty(21, 9, 64)
            if fused:
                any_kernels.qkv_attention(
                    q, k, v, pages, c.inputs, cos_sin=cos_sin, scale=0.125, out=out, head_norms=head_norms, frame=frame
                )
            else:
                if head_norms is not None:
                    any_kernels.rms_norm(q, norms.q, norms.eps, q)
                    any_kernels.rms_norm(k, norms.k, norms.eps, k)
                any_kernels.rope(q, k, c.inputs.positions, cos_sin)
                placed = None if frame is None else PlacedFrame(frame, c.inputs.positions, cos_sin)
                any_kernels.kv_write(pages, k, v, c.inputs.slots, placed)
                any_kernels.paged_attention(q, pages, c.inputs, 0.125, out, placed=placed)
            results.append((own, out))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert torch.equal(case.pool.storage, parts.pool.storage)


def test_the_next_step_is_not_run_with_the_last_ones_operands(native: KernelSet) -> None:
    outputs = []
    for cached in (3, 200):
        case = make_case(native, GEOMETRIES[0], ([1], [cached]), KVMode.FLOAT32)
        qkv, out = torch.linspace(-1, 1, 15 * 64).unsqueeze(0), torch.empty(1, 9, 64)
        q, k, v = (qkv[:, a:b].view(1, -1, 64) for a, b in ((0, 576), (576, 768), (768, 960)))
        native.qkv_attention(q, k, v, case.pool.view(1), case.inputs, cos_sin=torch.ones(400, 64), scale=1.0, out=out)
        assert not out.isnan().any()
        outputs.append(out)
    assert not torch.equal(*outputs)


def test_operands_checked_against_one_pool_are_checked_again_for_a_smaller_one(native: KernelSet) -> None:
    case = make_case(native, GEOMETRIES[0], ([1], [200]), KVMode.FLOAT32)
    smaller = KVPool(case.pool.layout, 2)
    qkv, out = torch.linspace(-1, 1, 15 * 64).unsqueeze(0), torch.empty(1, 9, 64)
    q, k, v = (qkv[:, a:b].view(1, -1, 64) for a, b in ((0, 576), (576, 768), (768, 960)))
    cos_sin, inputs = torch.ones(400, 64), replace(case.inputs, slots=torch.tensor([40]))
    for pool, refused in ((case.pool, False), (smaller, True)):
        with pytest.raises(GenerationError, match="slot 40, expected below 32") if refused else nullcontext():
            native.qkv_attention(q, k, v, pool.view(1), inputs, cos_sin=cos_sin, scale=1.0, out=out)


def test_a_block_table_that_is_too_short_is_refused(kernels: KernelSet) -> None:
    case = make_case(kernels, GEOMETRIES[0], ([1], [40]), KVMode.FLOAT32)
    inputs = step([1], [40], case.inputs.block_tables, 16)
    short = ForwardInputs(
        inputs.input_ids, inputs.positions, inputs.slots, inputs.cu_seqlens, inputs.block_tables[:, :2].contiguous(),
        inputs.cache_lens, inputs.logit_rows, 1, 41,
    )  # fmt: skip
    with pytest.raises(GenerationError, match="expected 3 columns or more for a context of 41"):
        kernels.paged_attention(case.q, case.pool.view(1), short, case.scale)
