"""Attention over latents against the expanded formula, and the promises about batches, chunks and threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracles import latents as oracle

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.latent_attention import FORMS, PackedUp, takes_expanded
from deepseek_tgi.kernels.latent_attention.native import LatentAttentionOp
from deepseek_tgi.kernels.select import KernelSet
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one attention: heads, part without position, value, rank, rotary part, slots a block."""

    heads: int
    nope: int
    value: int
    rank: int
    rope: int
    block: int = 16

    def __str__(self) -> str:
        return f"H{self.heads}-N{self.nope}-V{self.value}-R{self.rank}-D{self.rope}-S{self.block}"


SMALL = Geometry(5, 24, 40, 48, 10)
LITE = Geometry(16, 128, 128, 512, 64)
GEOMETRIES = [
    SMALL, LITE, Geometry(4, 32, 32, 128, 16, 48), Geometry(1, 17, 9, 16, 2), Geometry(33, 8, 100, 64, 6, 32),
    Geometry(128, 16, 16, 32, 8),
]  # fmt: skip
# Tokens and cached tokens of each request; 16, 64 and 256 are tile, panel and segment edges.
BATCHES = [
    ([1], [0]),
    ([1, 1, 1], [15, 63, 255]),
    ([1, 1, 1], [16, 64, 256]),
    ([33, 1, 0, 17], [0, 300, 9, 250]),
    ([70], [500]),
]
Batch = tuple[list[int], list[int]]
EVERY_GEOMETRY = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
EVERY_BATCH = pytest.mark.parametrize(
    "batch", BATCHES, ids=lambda b: "_".join(f"{n}at{c}" for n, c in zip(*b, strict=True))
)
EVERY_MODE = pytest.mark.parametrize("mode", list(KVMode), ids=lambda m: m.value)


@dataclass(frozen=True, slots=True)
class Case:
    """A filled pool, the step's inputs and queries, and the up-projection as a tensor and packed."""

    geometry: Geometry
    pool: KVPool
    inputs: ForwardInputs
    q: torch.Tensor
    weight: torch.Tensor
    up: PackedUp

    def run(self, kernels: KernelSet, form: str, inputs: ForwardInputs | None = None, first: int = 0) -> torch.Tensor:
        """The kernel's answer for `inputs` (else the case's own), whose queries begin at row `first`."""
        given = self.inputs if inputs is None else inputs
        g, count = self.geometry, int(given.cu_seqlens[-1])
        out = torch.full((count, g.heads, g.value), float("nan"))
        return kernels.latent_attention(
            self.q[first : first + count], self.pool.latents(1), self.up, given, scale=self.scale, out=out, form=form
        )

    @property
    def scale(self) -> float:
        return (self.geometry.nope + self.geometry.rope) ** -0.5

    def expected(self) -> np.ndarray:
        """The formula over what the pages hold."""
        parts, size = [], self.geometry.block
        starts, cached = self.inputs.cu_seqlens.tolist(), self.inputs.cache_lens.tolist()
        up = self.weight.view(self.geometry.heads, -1, self.geometry.rank).numpy()
        for b, blocks in enumerate(self.inputs.block_tables.long()):
            places = torch.arange(starts[b + 1] - starts[b] + cached[b])
            latent, rope = self.pool.read_latents(1, blocks[places // size] * size + places % size)
            q = self.q[starts[b] : starts[b + 1]].numpy()
            parts.append(oracle.attention(q, latent.numpy(), rope.numpy(), up, cached[b], self.scale))
        return np.concatenate(parts)


def step(tokens: list[int], cached: list[int], tables: torch.Tensor) -> ForwardInputs:
    """Inputs of a step whose tokens follow what is cached; slots and positions are not attention's business."""
    starts = torch.tensor([0, *np.cumsum(tokens)], dtype=torch.int32)
    nothing = torch.zeros(sum(tokens), dtype=torch.int64)
    longest = max(n + c for n, c in zip(tokens, cached, strict=True))
    lens = torch.tensor(cached, dtype=torch.int32)
    return ForwardInputs(nothing, nothing.int(), nothing, starts, tables, lens, nothing[:1], max(tokens), longest)


def make_case(kernels: KernelSet, g: Geometry, batch: Batch, mode: KVMode) -> Case:
    tokens, cached = batch
    columns = max(-(-(n + c) // g.block) for n, c in zip(tokens, cached, strict=True))
    num_blocks = columns * len(tokens) + 1
    tables = (torch.randperm(num_blocks - 1) + 1).view(len(tokens), columns).int()
    pool = KVPool(LatentLayout(2, g.rank, g.rope, mode, g.block), num_blocks)
    pool.storage.fill_(0xFF)  # NaN in every float format: what was not written must not be read
    for b, (n, c) in enumerate(zip(tokens, cached, strict=True)):
        places = torch.arange(n + c)
        slots = tables[b, places // g.block].long() * g.block + places % g.block
        kernels.latent_write(pool.latents(1), torch.randn(n + c, g.rank) + 0.2, torch.randn(n + c, g.rope), slots)
    weight = torch.randn(g.heads * (g.nope + g.value), g.rank) * g.rank**-0.5
    if kernels.compute_dtype.value == "bfloat16":  # the weight may be rounded to bfloat16: then this one is exact
        weight = weight.bfloat16().float()
    q = torch.randn(sum(tokens), g.heads, g.rope + g.nope)
    return Case(g, pool, step(tokens, cached, tables), q, weight, kernels.pack_up(weight, g.heads, g.nope))


@EVERY_GEOMETRY
@EVERY_BATCH
@pytest.mark.parametrize("form", FORMS[1:])
def test_equals_the_expanded_formula(kernels: KernelSet, geometry: Geometry, batch: Batch, form: str) -> None:
    if kernels.name == "reference" and (sum(batch[0]) > 3 or geometry != SMALL):
        pytest.skip("too slow for what it adds")
    case = make_case(kernels, geometry, batch, KVMode.FLOAT32)
    # Sums of R and D terms of size 1 are off by some 1e-6, which moves weights by as much; values are below 5.
    assert np.abs(case.run(kernels, form).numpy() - case.expected()).max() <= 1e-5


@EVERY_MODE
@pytest.mark.parametrize("geometry", [SMALL, Geometry(4, 32, 32, 128, 16)], ids=str)
def test_reads_every_format(any_kernels: KernelSet, mode: KVMode, geometry: Geometry) -> None:
    batch = ([2, 1], [40, 90]) if any_kernels.name == "reference" else ([20, 1], [70, 300])
    case = make_case(any_kernels, geometry, batch, mode)
    for form in FORMS:
        assert np.abs(case.run(any_kernels, form).numpy() - case.expected()).max() <= 1e-5, form


@EVERY_GEOMETRY
@pytest.mark.parametrize("mode", [KVMode.BFLOAT16, KVMode.INT4], ids=lambda m: m.value)
def test_a_query_has_the_same_bits_alone_chunked_and_in_a_batch(
    native: KernelSet, geometry: Geometry, mode: KVMode
) -> None:
    case = make_case(native, geometry, ([70, 1, 9], [230, 300, 250]), mode)
    tables = case.inputs.block_tables
    for form in ("absorbed", "expanded"):
        whole = case.run(native, form)
        for first, request, position, n in ((0, 0, 230, 2), (25, 0, 255, 3), (10, 0, 240, 40), (70, 1, 300, 1), (71, 2, 250, 9)):  # fmt: skip  # noqa: E501
            y = case.run(native, form, step([n], [position], tables[request : request + 1]), first)
            assert torch.equal(y, whole[first : first + n]), (form, request, position)
    absorbed = case.run(native, "absorbed")
    for i in (0, 26, 69):
        assert torch.equal(case.run(native, "absorbed", step([1], [230 + i], tables[:1]), i), absorbed[i : i + 1])


@EVERY_GEOMETRY
@pytest.mark.parametrize("form", FORMS[1:])
def test_the_number_of_threads_does_not_show(native: KernelSet, geometry: Geometry, form: str) -> None:
    for batch in (([1, 1], [700, 3]), ([70], [230])):
        case = make_case(native, geometry, batch, KVMode.INT8)
        op = native.latent_attention
        assert isinstance(op, LatentAttentionOp)
        alone = replace(native, latent_attention=LatentAttentionOp(op.library, 1))
        assert torch.equal(case.run(native, form), case.run(alone, form))


def test_more_tokens_than_are_absorbed_at_once(native_exact: KernelSet) -> None:
    case = make_case(native_exact, LITE, ([700, 400], [0, 10]), KVMode.BFLOAT16)  # 1024 tokens at once
    whole, tables = case.run(native_exact, "absorbed"), case.inputs.block_tables
    for first, n, cached, request in ((0, 700, 0, 0), (700, 400, 10, 1)):
        alone = case.run(native_exact, "absorbed", step([n], [cached], tables[request : request + 1]), first)
        assert torch.equal(alone, whole[first : first + n])


def test_more_keys_and_values_than_are_expanded_at_once(native_exact: KernelSet) -> None:
    # Half of the heads and one segment of 256 positions at once.
    case = make_case(native_exact, Geometry(64, 16, 2000, 16, 2), ([40], [600]), KVMode.FLOAT32)
    whole, tables = case.run(native_exact, "expanded"), case.inputs.block_tables
    assert float((whole - case.run(native_exact, "absorbed")).abs().max()) <= 1e-5
    assert torch.equal(case.run(native_exact, "expanded", step([15], [600], tables)), whole[:15])


def test_more_segments_than_are_merged_at_once(native_exact: KernelSet) -> None:
    # 63 segments at once; a single thread keeps no segment's result.
    case = make_case(native_exact, Geometry(128, 1, 1, 1024, 2), ([1], [16500]), KVMode.INT8)
    op = native_exact.latent_attention
    assert isinstance(op, LatentAttentionOp)
    alone = replace(native_exact, latent_attention=LatentAttentionOp(op.library, 1))
    assert torch.equal(case.run(native_exact, "auto"), case.run(alone, "auto"))


@pytest.mark.parametrize("form", FORMS)
def test_the_choice_of_a_form_is_the_requests_own(native: KernelSet, form: str) -> None:
    case = make_case(native, SMALL, ([70, 1, 9, 2], [0, 300, 250, 500]), KVMode.INT8)
    whole, tables, first = case.run(native, form), case.inputs.block_tables, 0
    for b, (n, c) in enumerate(((70, 0), (1, 300), (9, 250), (2, 500))):
        alone = case.run(native, form, step([n], [c], tables[b : b + 1]), first)
        assert torch.equal(alone, whole[first : first + n])
        first += n


def test_a_nan_stays_in_its_own_request(kernels: KernelSet) -> None:
    case = make_case(kernels, SMALL, ([3, 2], [20, 5]), KVMode.FLOAT32)
    pages, blocks = case.pool.latents(1), case.inputs.block_tables
    pages.latent[int(blocks[1, 0]), 3, 7] = float("nan")
    for form in FORMS:
        y = case.run(kernels, form)
        assert not bool(y[:3].isnan().any())
        assert bool(y[3:].isnan().any(-1).all())


def test_a_row_that_overflows_is_not_a_number_and_others_are(kernels: KernelSet) -> None:
    case = make_case(kernels, SMALL, ([2, 2], [20, 5]), KVMode.FLOAT32)
    case.q[1] = 3e38
    for form in FORMS:
        finite = case.run(kernels, form).isfinite()
        assert finite.all(-1).all(-1).tolist() == [True, False, True, True]


def test_large_scores_do_not_overflow(kernels: KernelSet) -> None:
    case = make_case(kernels, SMALL, ([3, 1], [20, 5]), KVMode.FLOAT32)
    case.q.mul_(300.0)
    for form in FORMS:
        # Scores near 1000, each off by 1e-4 or so: weights by as much.
        assert np.abs(case.run(kernels, form).numpy() - case.expected()).max() <= 3e-3


def test_operands_that_do_not_fit_are_refused(kernels: KernelSet) -> None:
    case = make_case(kernels, SMALL, ([1], [40]), KVMode.FLOAT32)
    short = replace(case.inputs, block_tables=case.inputs.block_tables[:, :2].contiguous())
    with pytest.raises(GenerationError, match="expected 3 columns or more for a context of 41"):
        case.run(kernels, "auto", short)
    with pytest.raises(GenerationError, match="form 'fast', expected one of auto, absorbed, expanded"):
        case.run(kernels, "fast")
    other = kernels.pack_up(torch.randn(5 * 64, 32), 5, 24)
    with pytest.raises(GenerationError, match="an up-projection of rank 32, expected 48"):
        replace(case, up=other).run(kernels, "auto")


# Multiply-adds a head, R = 512, Dn = Dv = 128, Dr = 64: a pair costs 1088 absorbed, 320 expanded; a query 131072
# absorbed, a position as much expanded, counted by sixteen and 8 more.
@pytest.mark.parametrize(
    ("tokens", "cached", "expanded"),
    [
        (64, 0, True),  # 2080 pairs: 2080 * 320 + 72 * 131072 = 10.1 million against 10.7
        (16, 0, False),  # 136 pairs: 24 * 131072 + 43520 = 3.2 million against 2.2
        (128, 512, False),  # 73792 pairs: 108.5 million against 97.1
        (200, 512, True),  # 122500 pairs: 134.7 million against 159.5
        (1, 4095, False),
    ],
)
def test_the_cheaper_form_is_taken(native_exact: KernelSet, tokens: int, cached: int, expanded: bool) -> None:
    up = native_exact.pack_up(torch.zeros(256, 512), 1, 128)
    assert takes_expanded("auto", tokens, cached, up, 64) == expanded
