"""Latent attention's kernels on a GPU over real sizes, against float64 on the same device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.latent_attention.cuda import CudaLatentAttention
from deepseek_tgi.kernels.latent_attention.decode import MODES, RANK, ROPE
from deepseek_tgi.kernels.latent_format import quantise_latent
from deepseek_tgi.kernels.pages import LatentPages
from deepseek_tgi.kernels.select import KernelSet, select_kernels
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

pytestmark = pytest.mark.gpu

NOPE, VALUE, BLOCK = 128, 128, 16
SCALE = (ROPE + NOPE) ** -0.5
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


@cache
def kernels() -> KernelSet:
    return select_kernels("cuda:0", ComputeDtype.BFLOAT16)


class Case:
    """Filled pages and a step over them."""

    def __init__(self, mode: str, heads: int, tokens: list[int], cached: list[int], offset: float = 0.2) -> None:
        torch.manual_seed(0)
        self.tokens, self.cached = tokens, cached
        lengths = [n + c for n, c in zip(tokens, cached, strict=True)]
        columns = -(-max(lengths) // BLOCK)
        self.pool = KVPool(LatentLayout(2, RANK, ROPE, KVMode(mode), BLOCK), columns * len(lengths) + 1, "cuda")
        self.pool.storage.fill_(0xFF)  # NaN in every float format: what was not written must not be read
        tables = (torch.randperm(columns * len(lengths), device="cuda") + 1).view(len(lengths), columns).int()
        self.contexts = []
        for row, length in zip(tables.long(), lengths, strict=True):
            places = torch.arange(length, device="cuda")
            slots = row[places // BLOCK] * BLOCK + places % BLOCK
            latent = torch.randn(length, RANK, device="cuda") + offset
            kernels().latent_write(self.pages, latent, torch.randn(length, ROPE, device="cuda"), slots)
            self.contexts.append([x.double() for x in self.pool.read_latents(1, slots)])
        starts = torch.tensor([0, *tokens], device="cuda").cumsum(0).int()
        lens = torch.tensor(cached, device="cuda").int()
        nothing = torch.zeros(sum(tokens), dtype=torch.int64, device="cuda")
        self.inputs = ForwardInputs(
            nothing, nothing.int(), nothing, starts, tables, lens, nothing[:1], max(tokens), max(lengths)
        )
        self.weight = (torch.randn(heads * (NOPE + VALUE), RANK, device="cuda") * RANK**-0.5).bfloat16()
        self.q = torch.randn(sum(tokens), heads, ROPE + NOPE, device="cuda").bfloat16()
        self.out = torch.full((sum(tokens), heads, VALUE), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.up = kernels().pack_up(self.weight, heads, NOPE)

    @property
    def pages(self) -> LatentPages:
        """The layer under test."""
        return self.pool.latents(1)

    def run(self, form: str = "auto") -> torch.Tensor:
        kernels().latent_attention(
            self.q, self.pages, self.up, self.inputs, scale=SCALE, out=self.out.fill_(float("nan")), form=form
        )
        return self.out

    def error(self) -> float:
        """Largest of the requests' errors, each over the size of its outputs."""
        up = self.weight.double().view(self.q.shape[1], -1, RANK)
        worst, first = 0.0, 0
        for n, c, (latent, rope) in zip(self.tokens, self.cached, self.contexts, strict=True):
            q = self.q[first : first + n].double()
            absorbed = torch.einsum("nhd,hdr->nhr", q[..., ROPE:], up[:, :NOPE])
            scores = (absorbed @ latent.T + q[..., :ROPE] @ rope.T) * SCALE
            later = torch.arange(n + c, device="cuda") > torch.arange(c, n + c, device="cuda").view(-1, 1, 1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            wanted = torch.einsum("nhr,hdr->nhd", weights @ latent, up[:, NOPE:])
            off = self.out[first : first + n].double() - wanted
            worst = max(worst, (off.norm() / wanted.norm()).item())
            first += n
        return worst


@EVERY_MODE
@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize(
    "cached", [[0], [8191], [0, 31, 32, 63, 64, 700, 4095], [17] * 300], ids=["one", "long", "edges", "many"]
)
def test_a_decode_step_is_the_formula_twice_alike(mode: str, heads: int, cached: list[int]) -> None:
    case = Case(mode, heads, [1] * len(cached), cached)
    first = case.run().clone()
    assert case.error() < 1e-2
    assert torch.equal(case.run(), first)


@EVERY_MODE
@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
def test_prompts_and_chunks_are_the_formula(mode: str, form: str) -> None:
    case = Case(mode, 16, [1, 300, 33, 64, 2], [500, 0, 1000, 77, 31])
    case.run(form)
    assert case.error() < 1.2e-2


@EVERY_MODE
def test_a_graph_gives_the_same_bits_for_other_lengths(mode: str) -> None:
    case = Case(mode, 16, [1] * 4, [3000, 20, 512, 1])
    eager = case.run().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    case.inputs.cache_lens.copy_(torch.tensor([100, 20, 0, 1], device="cuda"))
    graph.replay()
    assert torch.equal(case.out[[1, 3]].isfinite(), eager[[1, 3]].isfinite())
    shorter = case.out.clone()
    assert torch.equal(case.run(), shorter)
    case.inputs.cache_lens.copy_(torch.tensor([3000, 20, 512, 1], device="cuda"))
    graph.replay()
    assert torch.equal(case.out, eager)


@EVERY_MODE
def test_peaked_scores_and_large_latents_stay_finite(mode: str) -> None:
    case = Case(mode, 16, [1, 1], [2000, 77], offset=40.0)
    case.q *= 30
    case.run()
    assert case.error() < 2e-2


@EVERY_MODE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_written_bytes_are_the_formats_own(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = KVPool(LatentLayout(2, RANK, ROPE, KVMode(mode), BLOCK), 300, "cuda")
    x = (torch.randn(4096, RANK, device="cuda") * torch.randn(RANK, device="cuda").exp()).to(dtype)
    x[:64] *= torch.logspace(-12, 12, 64, device="cuda").unsqueeze(1).to(dtype)
    rope = torch.randn(4096, ROPE, device="cuda").to(dtype)
    slots = torch.randperm(pool.num_slots, device="cuda")[:4096]
    kernels().latent_write(pool.latents(1), x, rope, slots)
    pages = pool.latents(1)
    stored = pages.latent[slots // BLOCK, slots % BLOCK]
    assert torch.equal(pages.rope[slots // BLOCK, slots % BLOCK], rope.to(pages.rope.dtype))
    if pages.scale is None:
        limit = 65504.0 if mode == "float16" else float("inf")
        assert torch.equal(stored, x.float().clamp(-limit, limit).to(pages.latent.dtype))
        return
    codes, scale = quantise_latent(x.cpu().float(), mode, pages.group)
    assert torch.equal(stored.cpu(), codes)
    assert torch.equal(pages.scale[slots // BLOCK, slots % BLOCK].cpu(), scale)


@EVERY_MODE
def test_preparing_is_its_parts(mode: str) -> None:
    torch.manual_seed(0)
    heads, tokens, width = 16, 37, ROPE + NOPE
    rows = torch.randn(tokens, heads * width + RANK + ROPE, device="cuda").bfloat16()
    angles = torch.rand(100, ROPE // 2, device="cuda") * 6
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(100, (tokens,), device="cuda").int()
    slots = torch.randperm(20 * BLOCK, device="cuda")[:tokens]
    slots[3] = -1
    weight = torch.rand(RANK, device="cuda") + 0.5
    nothing = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    inputs = ForwardInputs(
        nothing, positions, slots, torch.arange(tokens + 1, device="cuda").int(),
        nothing.int().unsqueeze(1), nothing.int(), nothing, 1, BLOCK,
    )  # fmt: skip

    def cut(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return own[:, : heads * width].view(tokens, heads, width), own[:, -RANK - ROPE : -ROPE], own[:, -ROPE:]

    whole, apart = (KVPool(LatentLayout(1, RANK, ROPE, KVMode(mode), BLOCK), 20, "cuda") for _ in range(2))
    whole.storage.zero_(), apart.storage.zero_()
    own, other = rows.clone(), rows.clone()
    kernels().latent_prepare(*cut(own), whole.latents(0), inputs, norm_weight=weight, eps=1e-6, cos_sin=table)
    q, latent, rope = cut(other)
    exact = latent.double()
    exact = exact * (exact.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert ((cut(own)[1].double() - exact).abs() <= 2**-8 * exact.abs()).all()
    latent.copy_(cut(own)[1])  # its last bit may differ: what is stored must follow from what is left
    kernels().rope(q, rope.unsqueeze(1), positions, table)
    kernels().latent_write(apart.latents(0), latent, rope, slots)
    assert torch.equal(own, other)
    assert torch.equal(whole.storage, apart.storage)


@pytest.mark.parametrize("mode", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_what_the_launch_before_writes_is_read_after_it(mode: str, whole: bool, batch: int) -> None:
    heads, cached = 16, [1000 - 60 * i for i in range(batch)]
    case, width = Case(mode, heads, [1] * batch, cached), heads * (ROPE + NOPE)
    positions = torch.tensor(cached, device="cuda")
    blocks = case.inputs.block_tables.long().gather(1, (positions // BLOCK).unsqueeze(1)).squeeze(1)
    inputs = replace(case.inputs, positions=positions.int(), slots=blocks * BLOCK + positions % BLOCK)
    rows = torch.empty(batch, width + RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    sources = [torch.randn(batch, width + RANK + ROPE, device="cuda").bfloat16() for _ in range(12)]
    weight, table = torch.ones(rows.shape[1], device="cuda"), torch.rand(2000, ROPE, device="cuda")
    outs = [torch.empty_like(case.out) for _ in sources]

    def layer(out: torch.Tensor) -> None:
        q, latent, rope = rows[:, :width].view(batch, heads, -1), rows[:, width:-ROPE], rows[:, -ROPE:]
        norm = weight[:RANK]
        if whole:
            op = kernels().latent_layer
            assert op is not None
            op(
                q, latent, rope, case.pages, inputs, up=case.up, norm_weight=norm, eps=1e-6, cos_sin=table,
                scale=SCALE, out=out,
            )  # fmt: skip
            return
        kernels().latent_prepare(q, latent, rope, case.pages, inputs, norm_weight=norm, eps=1e-6, cos_sin=table)
        kernels().latent_attention(q, case.pages, case.up, inputs, scale=SCALE, out=out)

    expected = []
    for source, out in zip(sources, outs, strict=True):
        kernels().rms_norm(source, weight, 1e-6, rows)
        torch.cuda.synchronize()
        layer(out)
        expected.append(out.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source, out in zip(sources, outs, strict=True):
            kernels().rms_norm(source, weight, 1e-6, rows)
            layer(out)
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, outs, expected))


@EVERY_MODE
@pytest.mark.parametrize(("heads", "batch"), [(16, 1), (16, 4), (5, 5), (16, 17), (16, 64), (128, 3), (128, 33)])
def test_a_whole_layer_is_its_parts(mode: str, heads: int, batch: int) -> None:
    cached = [(i * 97) % 1200 for i in range(batch)]
    case, width = Case(mode, heads, [1] * batch, cached), heads * (ROPE + NOPE)
    positions = torch.tensor(cached, device="cuda")
    blocks = case.inputs.block_tables.long().gather(1, (positions // BLOCK).unsqueeze(1)).squeeze(1)
    inputs = replace(case.inputs, positions=positions.int(), slots=blocks * BLOCK + positions % BLOCK)
    given = torch.randn(batch, width + RANK + ROPE, device="cuda").bfloat16()
    weight, table = torch.rand(RANK, device="cuda") + 0.5, torch.rand(2000, ROPE, device="cuda")
    op = kernels().latent_layer
    assert op is not None

    def cut() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = given.clone()
        return own[:, :width].view(batch, heads, -1), own[:, width:-ROPE], own[:, -ROPE:]

    made = []
    for _ in range(2):
        op(
            *cut(), case.pages, inputs, up=case.up, norm_weight=weight, eps=1e-6, cos_sin=table, scale=SCALE,
            out=case.out.fill_(float("nan")),
        )  # fmt: skip
        made.append((case.out.clone(), case.pool.storage.clone()))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    case.q, latent, rope = cut()
    kernels().latent_prepare(case.q, latent, rope, case.pages, inputs, norm_weight=weight, eps=1e-6, cos_sin=table)
    assert torch.equal(case.pool.storage, made[0][1])
    for row, length in enumerate(cached):
        places = torch.arange(length + 1, device="cuda")
        slots = case.inputs.block_tables[row].long()[places // BLOCK] * BLOCK + places % BLOCK
        case.contexts[row] = [x.double() for x in case.pool.read_latents(1, slots)]
    assert case.error() < 1e-2


def test_the_set_has_these_kernels() -> None:
    assert isinstance(kernels().latent_attention, CudaLatentAttention)
