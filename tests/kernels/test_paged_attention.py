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
from deepseek_tgi.kernels.qkv_attention import HeadNorms
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import PER_HEAD_MODES, KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

# heads, KV heads, key size, value size, block size
GEOMETRIES = [(9, 3, 64, 64, 16), (4, 1, 72, 40, 32), (2, 2, 128, 128, 16), (5, 1, 24, 8, 16)]
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


def make_case(kernels: KernelSet, geometry: Geometry, batch: Batch, mode: KVMode) -> Case:
    heads, kv_heads, k_dim, v_dim, block_size = geometry
    tokens, cached = batch
    columns = max(-(-(n + c) // block_size) for n, c in zip(tokens, cached, strict=True))
    num_blocks = columns * len(tokens) + 1
    g = torch.Generator().manual_seed(len(tokens) + k_dim)
    tables = (torch.randperm(num_blocks - 1, generator=g) + 1).view(len(tokens), columns).int()
    pool = KVPool(KVLayout(2, kv_heads, k_dim, v_dim, mode, block_size), num_blocks)
    pool.storage.fill_(0xFF)  # NaN in every float format: what was not written must not be read
    for b, (n, c) in enumerate(zip(tokens, cached, strict=True)):
        places = torch.arange(n + c)
        slots = tables[b, places // block_size].long() * block_size + places % block_size
        k, v = torch.randn(n + c, kv_heads, k_dim, generator=g) + 0.5, torch.randn(n + c, kv_heads, v_dim, generator=g)
        kernels.kv_write(pool.view(1), k, v, slots)
    q = torch.randn(sum(tokens), heads, k_dim, generator=g)
    return Case(pool, step(tokens, cached, tables, block_size), q, k_dim**-0.5)


def expected(case: Case) -> np.ndarray:
    """The formula over what the pages hold."""
    parts = []
    size = case.pool.layout.block_size
    starts, cached = case.inputs.cu_seqlens.tolist(), case.inputs.cache_lens.tolist()
    for b, blocks in enumerate(case.inputs.block_tables.long()):
        n = starts[b + 1] - starts[b]
        places = torch.arange(n + cached[b])
        k, v = case.pool.read(1, blocks[places // size] * size + places % size)
        parts.append(
            oracle.attention(case.q[starts[b] : starts[b + 1]].numpy(), k.numpy(), v.numpy(), cached[b], case.scale)
        )
    return np.concatenate(parts)


@EVERY_GEOMETRY
@EVERY_BATCH
@pytest.mark.parametrize("mode", list(PER_HEAD_MODES), ids=lambda m: m.value)
def test_equals_the_formula_over_the_pages(kernels: KernelSet, geometry: Geometry, batch: Batch, mode: KVMode) -> None:
    if kernels.name == "reference" and (sum(batch[0]) > 40 or geometry != GEOMETRIES[0]):
        pytest.skip("too slow for what it adds")
    case = make_case(kernels, geometry, batch, mode)
    y = kernels.paged_attention(case.q, case.pool.view(1), case.inputs, case.scale)
    # Scores below 10 carry D additions' rounding, 1e-6, which moves weights by as much; values are below 5.
    assert np.abs(y.numpy() - expected(case)).max() <= 5e-6


@EVERY_GEOMETRY
@pytest.mark.parametrize("mode", [KVMode.FLOAT32, KVMode.INT8], ids=lambda m: m.value)
def test_a_query_has_the_same_bits_alone_and_in_a_batch(native: KernelSet, geometry: Geometry, mode: KVMode) -> None:
    case = make_case(native, geometry, ([70, 1, 9], [230, 300, 250]), mode)
    pages, tables = case.pool.view(1), case.inputs.block_tables
    whole = native.paged_attention(case.q, pages, case.inputs, case.scale)
    for first, request, position, n in ((0, 0, 230, 1), (25, 0, 255, 1), (26, 0, 256, 1), (69, 0, 299, 1), (70, 1, 300, 1), (10, 0, 240, 40), (71, 2, 250, 9)):  # fmt: skip  # noqa: E501
        alone = step([n], [position], tables[request : request + 1], case.pool.layout.block_size)
        y = native.paged_attention(case.q[first : first + n], pages, alone, case.scale)
        assert torch.equal(y, whole[first : first + n]), (request, position)


def test_one_call_equals_its_parts(any_kernels: KernelSet) -> None:
    case = make_case(any_kernels, GEOMETRIES[0], ([20, 1], [0, 300]), KVMode.INT8)
    parts = make_case(any_kernels, GEOMETRIES[0], ([20, 1], [0, 300]), KVMode.INT8)
    qkv, cos_sin = torch.randn(21, 15 * 64), torch.randn(400, 64)
    norms = HeadNorms(torch.rand(64), torch.rand(64), 1e-6)
    for head_norms in (None, norms):
        results = []
        for fused, c in ((True, case), (False, parts)):
            own = qkv.clone()
            q, k, v = (own[:, a:b].view(21, -1, 64) for a, b in ((0, 576), (576, 768), (768, 960)))
            pages, out = c.pool.view(1), torch.empty(21, 9, 64)
            if fused:
                any_kernels.qkv_attention(
                    q, k, v, pages, c.inputs, cos_sin=cos_sin, scale=0.125, out=out, head_norms=head_norms
                )
            else:
                if head_norms is not None:
                    any_kernels.rms_norm(q, norms.q, norms.eps, q)
                    any_kernels.rms_norm(k, norms.k, norms.eps, k)
                any_kernels.rope(q, k, c.inputs.positions, cos_sin)
                any_kernels.kv_write(pages, k, v, c.inputs.slots)
                any_kernels.paged_attention(q, pages, c.inputs, 0.125, out)
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
