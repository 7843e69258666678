"""Paged attention's CUDA sources, emulated, against the textbook formula in float64 over what the pages hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import paged_cases
import pytest
import torch
from emulation.emulated import EmulatedPrograms
from oracles import kernels as oracle

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.cuda.machine import shared_limit
from deepseek_tgi.kernels.cuda.program import Kernel, KernelSpec
from deepseek_tgi.kernels.paged_attention.cuda import DecodeShape, PagedDecode, Tiling
from deepseek_tgi.kernels.select import select_kernels
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

CPU = torch.device("cpu")
MODES = [KVMode.BFLOAT16, KVMode.FLOAT16, KVMode.INT8, KVMode.FP8, KVMode.INT4]
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
WEIGHT_STEP = {mode: 2.0**-8 if mode is KVMode.BFLOAT16 else 2.0**-10 for mode in MODES}
"""What rounding a weight changes it by, as a part of itself."""


@dataclass(frozen=True, slots=True)
class Case:
    """A filled pool, a decode step's inputs and queries."""

    pool: KVPool
    inputs: ForwardInputs
    q: torch.Tensor
    scale: float


def decode_inputs(tables: torch.Tensor, contexts: list[int]) -> ForwardInputs:
    """One token each, the last of its context."""
    batch = len(contexts)
    last = torch.tensor(contexts, dtype=torch.int32) - 1
    return ForwardInputs(
        torch.zeros(batch, dtype=torch.int64), last, torch.full((batch,), -1), torch.arange(batch + 1).int(), tables,
        last, torch.arange(batch), 1, max(contexts),
    )  # fmt: skip


def make_case(
    mode: KVMode,
    contexts: list[int],
    heads: int,
    kv_heads: int,
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    spread: float = 1.0,
) -> Case:
    """Pages of NaN but for the contexts, which lie in them in no order."""
    columns = max(-(-c // block_size) for c in contexts) + 1
    num_blocks = columns * len(contexts) + 1
    g = torch.Generator().manual_seed(len(contexts) + dims[0])
    tables = (torch.randperm(num_blocks - 1, generator=g) + 1).view(len(contexts), columns).int()
    pool = KVPool(KVLayout(2, kv_heads, *dims, mode, block_size), num_blocks)
    pool.storage.fill_(0xFF)
    write = select_kernels("cpu", ComputeDtype.FLOAT32, "torch", 1).kv_write
    for b, context in enumerate(contexts):
        places = torch.arange(context)
        slots = tables[b, places // block_size].long() * block_size + places % block_size
        k, v = (torch.randn(context, kv_heads, d, generator=g) * spread + 0.5 for d in dims)
        write(pool.view(1), k, v, slots)
    q = torch.randn(len(contexts), heads, dims[0], generator=g).bfloat16()
    return Case(pool, decode_inputs(tables, contexts), q, dims[0] ** -0.5)


def expected(case: Case) -> np.ndarray:
    """The formula over what the pages hold."""
    size, parts = case.pool.layout.block_size, []
    for b, cached in enumerate(case.inputs.cache_lens.tolist()):
        places = torch.arange(cached + 1)
        slots = case.inputs.block_tables[b, places // size].long() * size + places % size
        k, v = case.pool.read(1, slots)
        parts.append(oracle.attention(case.q[b : b + 1].float().numpy(), k.numpy(), v.numpy(), cached, case.scale))
    return np.concatenate(parts)


def attend(case: Case, processors: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((*case.q.shape[:2], case.pool.view(1).v_dim), float("nan"), dtype=dtype)
    PagedDecode(EmulatedPrograms(), processors, CPU)(case.q, case.pool.view(1), case.inputs, case.scale, out)
    return out


def assert_near(got: torch.Tensor, case: Case, mode: KVMode, largest: float = 5.0) -> None:
    """Weights are rounded once, values are below `largest` and sums are float32."""
    assert np.abs(got.double().numpy() - expected(case)).max() <= WEIGHT_STEP[mode] * largest


@EVERY_MODE
@pytest.mark.parametrize(
    "contexts",
    [[1], [15, 16, 17], [64, 65, 127, 128, 129], [500], [3, 300, 1, 70]],
    ids=lambda c: "-".join(map(str, c)),
)
def test_equals_the_formula_over_the_pages(mode: KVMode, contexts: list[int]) -> None:
    case = make_case(mode, contexts, 8, 2)
    assert_near(attend(case), case, mode)


GEOMETRIES = [  # heads, KV heads, key and value size, block size
    (KVMode.INT8, 4, 1, (128, 128), 16),
    (KVMode.FP8, 7, 1, (128, 96), 16),
    (KVMode.BFLOAT16, 5, 1, (96, 96), 32),
    (KVMode.FLOAT16, 2, 2, (256, 256), 16),
    (KVMode.INT8, 10, 1, (192, 128), 48),
    (KVMode.FP8, 40, 2, (32, 64), 16),
    (KVMode.INT4, 4, 1, (128, 128), 16),
    (KVMode.INT4, 7, 1, (256, 64), 32),
    (KVMode.INT4, 20, 2, (64, 128), 16),
]


@pytest.mark.parametrize(
    ("mode", "heads", "kv_heads", "dims", "block_size"),
    GEOMETRIES,
    ids=[f"{m.value}-H{h}-G{g}-D{d[0]}-V{d[1]}-S{s}" for m, h, g, d, s in GEOMETRIES],
)
def test_every_geometry(mode: KVMode, heads: int, kv_heads: int, dims: tuple[int, int], block_size: int) -> None:
    case = make_case(mode, [40, 150], heads, kv_heads, dims, block_size)
    assert_near(attend(case), case, mode)


def test_blocks_share_contexts_in_any_way() -> None:
    mode = KVMode.INT8
    case = make_case(mode, [1, 700, 20, 260], 6, 2)
    for processors in (1, 3, 7):
        assert_near(attend(case, processors), case, mode)


@EVERY_MODE
def test_clusters_take_contexts_together(mode: KVMode) -> None:
    """Twice with the launch that may: where it does, and where contexts are too unlike."""
    case = make_case(mode, [1, 700, 20, 260], 6, 2)
    decode = PagedDecode(EmulatedPrograms(), 16, CPU, (8, 4, 2))
    for more_pieces in (9, -9):
        out = torch.full((4, 6, 64), float("nan"))
        decode.launch(
            (case.q, out), case.pool.view(1), case.inputs, scale=case.scale, more_pieces=more_pieces, least_tokens=128
        )
        assert_near(out, case, mode)
        through_memory = any(bool(parts.isfinite().any()) for parts in decode._parts.values())
        assert through_memory == (more_pieces < 0), "clusters leave no parts in memory"


@EVERY_MODE
def test_no_nan_where_numbers_are_huge_or_tiny(mode: KVMode) -> None:
    """Scores in the thousands: weights collapse on one token, and none is NaN."""
    case = make_case(mode, [200, 33], 8, 2, spread=300.0)
    case.q[0] *= 100
    case.q[1, :4] *= 1e-30
    case.q[1, 4] = 0
    got, want = attend(case).double().numpy(), expected(case)
    assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()


def test_outputs_in_bfloat16_and_strided_queries() -> None:
    case = make_case(KVMode.BFLOAT16, [90, 5], 8, 2)
    wide = torch.full((2, 24, 64), float("nan")).bfloat16()
    wide[:, 8:16] = case.q
    strided = Case(case.pool, case.inputs, wide[:, 8:16], case.scale)
    out = attend(strided, dtype=torch.bfloat16)
    assert torch.equal(out, attend(case).bfloat16())


def test_a_row_of_padding_harms_no_other() -> None:
    case = make_case(KVMode.INT8, [90, 5, 40], 8, 2)
    alone = attend(case)
    case.inputs.block_tables[1] = 0
    case.inputs.cache_lens[1] = 0
    assert torch.equal(attend(case)[2], alone[2])
    assert bool(attend(case)[0].isfinite().all())


CENTRED = [  # heads, KV heads, key and value size, block size
    (KVMode.INT8, (14, 2, 64, 64, 16)),
    (KVMode.INT8, (4, 1, 128, 64, 32)),
    (KVMode.INT4, (14, 2, 64, 64, 16)),
    (KVMode.INT4, (4, 1, 128, 64, 32)),
    (KVMode.FP8, (3, 1, 96, 96, 48)),
    (KVMode.INT8, (10, 1, 32, 64, 16)),
    (KVMode.INT8, (2, 1, 192, 32, 16)),
    (KVMode.INT4, (2, 1, 256, 64, 32)),
]


@pytest.mark.parametrize(
    ("mode", "geometry"), CENTRED, ids=[f"{m.value}-H{g[0]}-G{g[1]}-D{g[2]}-V{g[3]}-S{g[4]}" for m, g in CENTRED]
)
@pytest.mark.parametrize("stretch", [1.0, 1.37], ids=["plain", "yarn"])
def test_what_was_taken_off_a_key_is_back(mode: KVMode, geometry: paged_cases.Geometry, stretch: float) -> None:
    """`stretch` is what yarn multiplies cosines and sines by."""
    kernels = select_kernels("cpu", ComputeDtype.FLOAT32, "torch", 1)
    case = paged_cases.make_case(kernels, geometry, ([1, 1, 1], [60, 255, 15]), mode, framed=True, stretch=stretch)
    q = case.q.bfloat16()
    out = torch.full((*q.shape[:2], geometry[3]), float("nan"))
    PagedDecode(EmulatedPrograms(), 2, CPU)(q, case.pool.view(1), case.inputs, case.scale, out, placed=case.placed)
    want = paged_cases.expected(replace(case, q=q.float()))
    # Scores of up to 60, whose terms are known to 2^-21 of the largest.
    assert np.abs(out.double().numpy() - want).max() <= 2.0**-9 * 5


def test_int4_scales_beyond_half_precision() -> None:
    case = make_case(KVMode.INT4, [70, 20], 8, 2, spread=9000.0)
    case.q[:] *= 1e-4
    got, want = attend(case).double().numpy(), expected(case)
    assert np.abs(got - want).max() <= 2.0**-9 * np.abs(want).max()


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_block_asks_for_no_more_shared_memory_than_there_is(capability: int, width: int) -> None:
    """Limits: CUDA C++ programming guide, technical specifications by compute capability."""
    limit = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}[capability] * 1024
    wanted: list[int] = []

    class Recorder:
        def kernel(self, spec: KernelSpec) -> Kernel:
            wanted.append(spec.shared_bytes)
            return lambda *_, **__: None

    decode = PagedDecode(Recorder(), 132, CPU, (8, 4, 2) if capability >= 90 else (), shared_limit(capability))
    for batch in (1, 300):
        pages = KVPool(KVLayout(1, 2, width, width, KVMode.INT4), 1).view(0)
        inputs = decode_inputs(torch.zeros(batch, 1, dtype=torch.int32), [5] * batch)
        q = torch.zeros(batch, 8, width).bfloat16()
        decode(q, pages, inputs, 1.0, torch.empty_like(q))
    assert max(wanted) <= limit


def test_levels_are_looked_up_by_a_constant_address_where_it_is_known_and_blocks_come_alone() -> None:
    int4 = DecodeShape("int4", 128, 128, 16, 4, torch.bfloat16, torch.bfloat16)
    int8 = replace(int4, mode="int8")
    alone, together = Tiling(2, 8, 2), Tiling(1, 8, 2, 8)
    starts = [
        dict(shape.spec(tiling, 1024).defines)["SHARED_START"]
        for shape, tiling in ((int4, alone), (int4, together), (int8, alone))
    ]
    assert starts == [1024, 0, 0]
    assert dict(int4.spec(alone).defines)["SHARED_START"] == 0
