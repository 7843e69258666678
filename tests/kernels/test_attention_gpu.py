"""Attention and the write into pages on a GPU, over real sizes, against the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_cases import step

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.cuda.machine import machine_of
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.paged_attention.cuda import shared_start
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from deepseek_tgi.kernels.vector_store import read_keys, read_vectors
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

pytestmark = pytest.mark.gpu

MODES = [mode for mode in KVMode if mode is not KVMode.FLOAT32]
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
Geometry = tuple[int, int, int, int, int]
USUAL: Geometry = (32, 8, 128, 128, 16)
SHAPES: list[tuple[KVMode, Geometry]] = [  # heads, KV heads, key size, value size, block size
    *((mode, USUAL) for mode in MODES),
    (KVMode.INT8, (28, 4, 128, 128, 32)),
    (KVMode.BFLOAT16, (14, 2, 64, 64, 16)),
    (KVMode.FP8, (15, 3, 96, 96, 16)),
    (KVMode.INT8, (8, 2, 256, 256, 16)),
    (KVMode.FLOAT16, (40, 2, 128, 128, 16)),
    (KVMode.INT8, (10, 1, 192, 128, 48)),
    (KVMode.INT4, (12, 2, 64, 64, 16)),
]


def shapes(some: list[tuple[KVMode, Geometry]]) -> pytest.MarkDecorator:
    """A test for each, named."""
    ids = [f"{m.value}-H{g[0]}-G{g[1]}-D{g[2]}-V{g[3]}-S{g[4]}" for m, g in some]
    return pytest.mark.parametrize(("mode", "geometry"), some, ids=ids)


DECODES = [[1], [17, 300, 5000], [1000, 33, 64], [3] * 68 + [2, 65, 2000]]
PROMPTS = [([700], [0]), ([33, 1, 0, 257], [0, 300, 9, 4000]), ([1] * 20 + [9], [50] * 21)]


@pytest.fixture(scope="module", name="gpu")
def make_gpu() -> KernelSet:
    return select_kernels("cuda:0", ComputeDtype.BFLOAT16)


def filled(
    gpu: KernelSet, geometry: Geometry, tokens: list[int], cached: list[int], mode: KVMode,
    placed: PlacedFrame | None = None,
) -> tuple[LayerPages, ForwardInputs]:  # fmt: skip
    """Pages of NaN but for the contexts, written by the set's own op; the step over them."""
    _, kv_heads, k_dim, v_dim, size = geometry
    columns = max(-(-(n + c) // size) for n, c in zip(tokens, cached, strict=True)) + 1
    num_blocks = columns * len(tokens) + 1
    tables = (torch.randperm(num_blocks - 1) + 1).view(len(tokens), columns).int()
    pool = KVPool(KVLayout(2, kv_heads, k_dim, v_dim, mode, size), num_blocks, "cuda")
    pool.storage.fill_(0xFF)
    for b, (n, c) in enumerate(zip(tokens, cached, strict=True)):
        places = torch.arange(n + c)
        slots = (tables[b, places // size].long() * size + places % size).cuda()
        k, v = (torch.randn(n + c, kv_heads, d, device="cuda") + 0.5 for d in (k_dim, v_dim))
        at = None if placed is None else replace(placed, positions=places.int().cuda())
        if at is not None and at.frame.centre is not None:
            k += at.turned(at.frame.centre, places.cuda())
        if n + c:
            gpu.kv_write(pool.view(1), k, v, slots, at)
    inputs = step(tokens, cached, tables, size)
    moved = {name: getattr(inputs, name).cuda() for name in (
        "input_ids", "positions", "slots", "cu_seqlens", "block_tables", "cache_lens", "logit_rows"
    )}  # fmt: skip
    return pool.view(1), replace(inputs, **moved)


def expected(
    q: torch.Tensor, pages: LayerPages, inputs: ForwardInputs, scale: float, placed: PlacedFrame | None = None
) -> torch.Tensor:
    """The textbook formula in float64 over what the pages hold."""
    size, starts, parts = pages.block_size, inputs.cu_seqlens.tolist(), []
    for b, cached in enumerate(inputs.cache_lens.tolist()):
        n = starts[b + 1] - starts[b]
        if n == 0:
            continue
        total = cached + n
        blocks = inputs.block_tables[b, : -(-total // size)].long()
        k, k_scale, v, v_scale = (
            None if x is None else x[blocks].transpose(0, 1).flatten(1, 2)[:, :total]
            for x in (pages.k, pages.k_scale, pages.v, pages.v_scale)
        )
        assert k is not None
        assert v is not None
        keys, values = read_keys(pages, k, k_scale, placed).double(), read_vectors(pages.mode, v, v_scale).double()
        rows = q[starts[b] : starts[b + 1]].double().unflatten(1, (pages.num_heads, -1))  # [n, G, R, D]
        scores = torch.einsum("ngrd,gld->gnrl", rows, keys) * scale
        hidden = torch.arange(total, device=q.device) > torch.arange(cached, total, device=q.device).unsqueeze(1)
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        parts.append(torch.einsum("gnrl,gld->ngrd", weights, values).flatten(1, 2))
    return torch.cat(parts)


def check(
    gpu: KernelSet, geometry: Geometry, tokens: list[int], cached: list[int], mode: KVMode,
    placed: PlacedFrame | None = None, factor: float = 1.0,
) -> None:  # fmt: skip
    """Twice the same bits, and the formula's numbers."""
    pages, inputs = filled(gpu, geometry, tokens, cached, mode, placed)
    q = (torch.randn(sum(tokens), geometry[0], geometry[2], device="cuda") * factor).bfloat16()
    out = [torch.full((*q.shape[:2], geometry[3]), float("nan"), device="cuda") for _ in range(2)]
    for y in out:
        gpu.paged_attention(q, pages, inputs, geometry[2] ** -0.5, y, placed=placed)
    assert torch.equal(out[0], out[1])
    want = expected(q, pages, inputs, geometry[2] ** -0.5, placed)
    # Weights, and INT4's values, are rounded to 8 bits of mantissa at worst.
    assert float((out[0] - want).abs().max()) <= 2.0**-7 * float(want.abs().max())
    assert float((out[0] - want).norm() / want.norm()) <= 5e-3


@shapes(SHAPES)
def test_decode_equals_the_formula(gpu: KernelSet, mode: KVMode, geometry: Geometry) -> None:
    for contexts in DECODES:
        check(gpu, geometry, [1] * len(contexts), [c - 1 for c in contexts], mode)


@shapes(SHAPES[:8])
def test_prompts_equal_the_formula(gpu: KernelSet, mode: KVMode, geometry: Geometry) -> None:
    for tokens, cached in PROMPTS:
        check(gpu, geometry, tokens, cached, mode)


def placed_centre(kv_heads: int, width: int, rotary: int, part: float, size: float) -> PlacedFrame:
    """A centre of elements of `size` on a `part` of the elements, of which `rotary` turn."""
    angles = torch.arange(9216).unsqueeze(1) * torch.logspace(0, -3, rotary // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).cuda()
    centre = torch.randn(kv_heads, width, device="cuda") * (torch.rand(kv_heads, width, device="cuda") < part)
    return PlacedFrame(Frame(centre * size), torch.empty(0), cos_sin)


CENTRED: list[tuple[KVMode, Geometry]] = [
    *((mode, (28, 4, 128, 128, size)) for mode in (KVMode.INT8, KVMode.FP8, KVMode.INT4) for size in (16, 32)),
    (KVMode.INT8, (40, 2, 128, 128, 48)),
    (KVMode.INT4, (14, 2, 64, 64, 16)),
    (KVMode.FP8, (15, 3, 96, 96, 16)),
    (KVMode.INT8, (8, 2, 256, 64, 16)),
    (KVMode.INT4, (8, 2, 256, 64, 16)),
]


@shapes(CENTRED)
@pytest.mark.parametrize("cached", [[700, 15, 1000], [0, 8191], [100 + n for n in range(70)]], ids=len)
def test_what_was_taken_off_a_key_is_back(gpu: KernelSet, mode: KVMode, geometry: Geometry, cached: list[int]) -> None:
    """Few pairs and all, and a part that does not turn; a bias far beyond what keys vary by."""
    kv_heads, width = geometry[1], geometry[2]
    for part, rotary, size in ((0.3, width, 8.0), (1.0, width - 32, 1.0), (1.0, width, 20.0)):
        check(gpu, geometry, [1] * len(cached), cached, mode, placed_centre(kv_heads, width, rotary, part, size))


@pytest.mark.parametrize("mode", [KVMode.INT8, KVMode.INT4], ids=lambda m: m.value)
def test_what_was_taken_off_is_back_in_prompts(gpu: KernelSet, mode: KVMode) -> None:
    check(gpu, (28, 4, 128, 128, 16), [20, 1, 100], [700, 15, 1000], mode, placed_centre(4, 128, 128, 0.3, 8.0))


@EVERY_MODE
def test_no_nan_where_scores_are_huge(gpu: KernelSet, mode: KVMode) -> None:
    # At INT4 queries are rotated, and rounded to half precision then: errors grow with scores.
    check(gpu, USUAL, [1, 1], [1999, 300], mode, factor=10.0 if mode is KVMode.INT4 else 300.0)


@EVERY_MODE
def test_a_graph_replays_what_a_step_did(gpu: KernelSet, mode: KVMode) -> None:
    pages, inputs = filled(gpu, USUAL, [1, 1], [900, 300], mode)
    q = torch.randn(2, 32, 128, device="cuda").bfloat16()
    out = torch.full_like(q, float("nan"))
    gpu.paged_attention(q, pages, inputs, 0.1, out)
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.paged_attention(q, pages, inputs, 0.1, out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager)
    inputs.cache_lens.sub_(100)
    graph.replay()
    assert not torch.equal(out, eager)
    gpu.paged_attention(q, pages, inputs, 0.1, eager)
    assert torch.equal(out, eager)


@pytest.mark.parametrize("mode", list(KVMode), ids=lambda m: m.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bytes_are_those_of_a_cpu(gpu: KernelSet, mode: KVMode, dtype: torch.dtype) -> None:
    reference = select_kernels("cpu", ComputeDtype.FLOAT32, "torch")
    layout = KVLayout(1, 8, 128, 64, mode)
    pools = KVPool(layout, 20), KVPool(layout, 20, "cuda")
    k, v = (torch.randn(300, 8, d) * torch.randn(300, 8, 1).exp() for d in (128, 64))
    k[0], k[1], k[2], k[3] = 0.0, 7.123, k[2] * 1e30, k[3] * 1e-9
    k, v = k.to(dtype), v.to(dtype)
    slots = torch.randperm(320)[:300]
    slots[7] = -1
    reference.kv_write(pools[0].view(0), k.float(), v.float(), slots)
    gpu.kv_write(pools[1].view(0), k.cuda(), v.cuda(), slots.cuda())
    assert torch.equal(pools[0].storage, pools[1].storage.cpu())


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A copy that compares NaN with NaN."""
    return x.contiguous().clone().view(torch.uint8)


QWEN: Geometry = (28, 4, 128, 128, 32)
FEW, SOME, MANY = [1025], [40, 1, 9000, 700], [300] * 20 + [129] * 20
STEPS: list[tuple[KVMode, Geometry, bool, list[int]]] = [  # with a centre, and contexts
    (KVMode.BFLOAT16, USUAL, False, FEW),
    (KVMode.FP8, USUAL, False, FEW),
    (KVMode.INT8, USUAL, False, SOME),
    (KVMode.INT8, USUAL, False, MANY),
    (KVMode.INT8, QWEN, True, FEW),
    (KVMode.INT4, USUAL, True, SOME),
]


@pytest.mark.parametrize(
    ("mode", "geometry", "framed", "contexts"), STEPS, ids=[f"{s[0].value}-{len(s[3])}" for s in STEPS]
)
def test_a_recorded_step_of_heads_equals_its_parts(
    gpu: KernelSet, mode: KVMode, geometry: Geometry, framed: bool, contexts: list[int]
) -> None:
    """The bytes stored are those of the parts, and results near the formula, however early the launch begins."""
    heads, kv_heads, width = geometry[:3]
    angles = torch.arange(9216).unsqueeze(1) * torch.logspace(0, -3, width // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).cuda()
    frame = Frame(torch.randn(kv_heads, width, device="cuda") * 2) if framed else None
    placed = None if frame is None else PlacedFrame(frame, torch.empty(0), cos_sin)
    batch, before = len(contexts), [c - 1 for c in contexts]
    pages, inputs = filled(gpu, geometry, [1] * batch, before, mode, placed)
    rows = torch.randn(batch, (heads + 2 * kv_heads) * width, device="cuda").bfloat16()
    parts = rows.clone().view(batch, -1, width)
    q, k, v = parts.split((heads, kv_heads, kv_heads), 1)
    gpu.rope(q, k, inputs.positions, cos_sin)
    at = None if placed is None else replace(placed, positions=inputs.positions)
    gpu.kv_write(pages, k, v, inputs.slots, at)
    stores = [x for x in (pages.k, pages.v, pages.k_scale, pages.v_scale) if x is not None]
    stored = [as_bytes(x) for x in stores]
    want = expected(q, pages, inputs, width**-0.5, at)
    heads_buffer, out = torch.empty_like(rows), torch.empty(batch, heads, width, device="cuda").bfloat16()
    source = torch.zeros_like(rows)

    def run() -> None:
        torch.add(source, 0, out=heads_buffer)
        q, k, v = heads_buffer.view(batch, -1, width).split((heads, kv_heads, kv_heads), 1)
        gpu.qkv_attention(q, k, v, pages, inputs, cos_sin=cos_sin, scale=width**-0.5, out=out, frame=frame)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    source.copy_(rows)
    results = []
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        results.append(out.clone())
        assert all(torch.equal(as_bytes(a), b) for a, b in zip(stores, stored, strict=True))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert float((out.double() - want).abs().max()) <= 2.0**-7 * float(want.abs().max())


def test_a_gpu_says_where_shared_memory_begins() -> None:
    device = torch.device("cuda:0")
    start = shared_start(machine_of(device).programs, device)
    assert start > 0, "0 is for a GPU that does not say"
    assert start % 16 == 0
