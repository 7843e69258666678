"""Attention over pages against the textbook formula, and the promise about batches and chunks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_cases import Batch, Geometry, expected, make_case, step

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.qkv_attention import HeadNorms
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import KVMode
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


@EVERY_GEOMETRY
@EVERY_BATCH
@pytest.mark.parametrize("mode", list(KVMode), ids=lambda m: m.value)
def test_equals_the_formula_over_the_pages(kernels: KernelSet, geometry: Geometry, batch: Batch, mode: KVMode) -> None:
    if kernels.name == "reference" and mode is KVMode.INT4 and (sum(batch[0]) > 40 or geometry != GEOMETRIES[0]):
        pytest.skip("too slow for what it adds")
    case = make_case(kernels, geometry, batch, mode)
    y = kernels.paged_attention(case.q, case.pool.view(1), case.inputs, case.scale)
    # Scores below 10 carry D additions' rounding, 1e-6, which moves weights by as much; values are below 5.
    assert np.abs(y.numpy() - expected(case)).max() <= 5e-6


@EVERY_GEOMETRY
@pytest.mark.parametrize("mode", [KVMode.FLOAT16, KVMode.INT8, KVMode.FP8, KVMode.INT4], ids=lambda m: m.value)
def test_what_was_taken_off_a_key_is_back_when_it_is_read(kernels: KernelSet, geometry: Geometry, mode: KVMode) -> None:
    if kernels.name == "reference" and mode is KVMode.INT4 and geometry != GEOMETRIES[0]:
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
    cached = 60 if any_kernels.name == "reference" and mode is KVMode.INT4 else 300  # which searches in Python
    case = make_case(any_kernels, GEOMETRIES[0], ([20, 1], [0, cached]), mode)
    parts = make_case(any_kernels, GEOMETRIES[0], ([20, 1], [0, cached]), mode)
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
