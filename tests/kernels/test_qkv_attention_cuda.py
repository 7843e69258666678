"""The ops over the CUDA sources, emulated, against the same made of torch's operators; and what they hand to others."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from emulation.emulated import EmulatedPrograms

from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.errors import GenerationError
from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.cuda.heads import HeadWriter
from deepseek_tgi.kernels.device_set import operators
from deepseek_tgi.kernels.frame import Frame
from deepseek_tgi.kernels.paged_attention.cuda import PagedAttentionOp, PagedDecode
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kernels.qkv_attention import HeadNorms
from deepseek_tgi.kernels.qkv_attention.cuda import QkvAttentionOp
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 6, 2, 64
TORCH = operators(CPU, ComputeDtype.BFLOAT16)


def make_op(processors: int = 2, clusters: tuple[int, ...] = ()) -> QkvAttentionOp:
    programs = EmulatedPrograms()
    attention = PagedAttentionOp(PagedDecode(programs, processors, CPU, clusters), TORCH.paged_attention)
    return QkvAttentionOp(HeadWriter(programs), attention, TORCH.qkv_attention)


def step(tokens: list[int], cached: list[int], tables: torch.Tensor) -> ForwardInputs:
    """Tokens that follow what is cached; the second request's are stored already."""
    owners = [b for b, n in enumerate(tokens) for _ in range(n)]
    positions = torch.tensor([c + i for n, c in zip(tokens, cached, strict=True) for i in range(n)])
    slots = tables[owners, positions // 16].long() * 16 + positions % 16
    slots[[b == 1 for b in owners]] = -1
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    contexts = [n + c for n, c in zip(tokens, cached, strict=True)]
    return ForwardInputs(
        torch.zeros(len(owners), dtype=torch.int64), positions.int(), slots, starts, tables,
        torch.tensor(cached, dtype=torch.int32), torch.arange(len(tokens)), max(tokens), max(contexts),
    )  # fmt: skip


@pytest.mark.parametrize("mode", [KVMode.BFLOAT16, KVMode.INT8, KVMode.FP8, KVMode.INT4], ids=lambda m: m.value)
@pytest.mark.parametrize("tokens", [[1, 1], [3, 20]], ids=["decode", "prompts"])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "norms-and-frame"])
@pytest.mark.parametrize(("processors", "clusters"), [(2, ()), (8, ()), (8, (2,))], ids=["many", "few", "clusters"])
def test_the_fused_call_is_its_parts(
    mode: KVMode, tokens: list[int], extras: bool, processors: int, clusters: tuple[int, ...]
) -> None:
    tables = (torch.randperm(24) + 1).view(2, 12).int()
    inputs = step(tokens, [150, 17], tables)
    angles = torch.arange(192).unsqueeze(1) * torch.logspace(0, -3, WIDTH // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    norms = HeadNorms(torch.rand(WIDTH) + 0.5, torch.rand(WIDTH) + 0.5, 1e-6) if extras else None
    frame = Frame(torch.randn(KV_HEADS, WIDTH) * 3) if extras else None
    rows = torch.randn(sum(tokens), (HEADS + 2 * KV_HEADS) * WIDTH).bfloat16()
    filled = torch.randint(0, 100, (1 << 16,), dtype=torch.uint8)
    results = []
    for attend in (make_op(processors, clusters), TORCH.qkv_attention):
        pool = KVPool(KVLayout(1, KV_HEADS, WIDTH, WIDTH, mode), 25)
        pool.storage.view(-1)[:] = filled.repeat(-(-pool.nbytes // len(filled)))[: pool.nbytes]
        heads = rows.clone().view(len(rows), -1, WIDTH)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        out = torch.full((len(rows), HEADS, WIDTH), float("nan")).bfloat16()
        attend(
            q, k, v, pool.view(0), inputs, cos_sin=cos_sin, scale=0.125, out=out, head_norms=norms, frame=frame
        )  # fmt: skip
        results.append((pool.storage, heads, out))
    ours, theirs = results
    in_one_launch = tokens == [1, 1] and mode is not KVMode.INT4 and processors > 2
    if norms is None:
        assert torch.equal(ours[0], theirs[0])
    if in_one_launch:
        assert torch.equal(ours[1], rows.view(len(rows), -1, WIDTH)), "heads were turned: this was not one launch"
    elif norms is None:
        assert torch.equal(ours[1], theirs[1])
    off = (ours[2].float() - theirs[2].float()).abs().max()
    # Results rounded to bfloat16, norms whose sums have another order, and the weights' own rounding.
    assert off <= 2.0**-6 * theirs[2].float().abs().max()


def test_what_no_kernel_takes_is_said_once_and_done_by_others(caplog: pytest.LogCaptureFixture) -> None:
    pool = KVPool(KVLayout(1, KV_HEADS, WIDTH, WIDTH, KVMode.FLOAT32), 9)
    pool.storage.zero_()
    inputs = step([1, 1], [40, 17], torch.tensor([[3, 1, 5, 6], [2, 4, 7, 8]], dtype=torch.int32))
    op = PagedAttentionOp(PagedDecode(EmulatedPrograms(), 2, CPU), TORCH.paged_attention)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            y = op(torch.randn(2, HEADS, WIDTH), pool.view(0), inputs, 1.0)
    assert len(caplog.records) == 1
    assert "no CUDA kernel for pages of float32" in caplog.text
    assert torch.equal(y, torch.zeros_like(y))


def test_keys_with_a_centre_and_uneven_angles_go_to_others(caplog: pytest.LogCaptureFixture) -> None:
    """As a base that grows with the position makes them: the kernel composes angles from those of 16 tokens."""
    tables = (torch.randperm(24) + 1).view(2, 12).int()
    inputs = step([1, 1], [150, 17], tables)
    bases = 10000.0 * (1 + torch.arange(192.0).clamp(min=64) / 8)
    angles = torch.arange(192).unsqueeze(1) * bases.unsqueeze(1) ** -torch.linspace(0, 1, WIDTH // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    frame = Frame(torch.randn(KV_HEADS, WIDTH) * 3)
    rows = torch.randn(2, HEADS + 2 * KV_HEADS, WIDTH).bfloat16()
    results = []
    for attend in (make_op(8), TORCH.qkv_attention):
        pool = KVPool(KVLayout(1, KV_HEADS, WIDTH, WIDTH, KVMode.INT8), 25)
        pool.storage.fill_(0x2A)
        out = torch.full((2, HEADS, WIDTH), float("nan")).bfloat16()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                q, k, v = rows.clone().split((HEADS, KV_HEADS, KV_HEADS), 1)
                attend(q, k, v, pool.view(0), inputs, cos_sin=cos_sin, scale=0.125, out=out, frame=frame)
        results.append(out.float())
    assert "angles that are not in proportion to positions" in caplog.text
    assert len(caplog.records) == 1
    assert (results[0] - results[1]).abs().max() <= 2.0**-6 * results[1].abs().max()


def test_heads_that_do_not_fit_the_pages_are_refused() -> None:
    pool = KVPool(KVLayout(1, KV_HEADS, WIDTH, WIDTH, KVMode.INT8), 9)
    inputs = step([1, 1], [40, 17], torch.tensor([[3, 1, 5, 6], [2, 4, 7, 8]], dtype=torch.int32))
    heads = torch.randn(2, HEADS + 2 * KV_HEADS, 96)
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
    with pytest.raises(GenerationError, match=r"got q \[2, 6, 96\] float32, expected \[2, 6, 64\]"):
        make_op()(
            q, k, v, pool.view(0), inputs, cos_sin=torch.ones(64, 64), scale=1.0, out=torch.empty(2, HEADS, WIDTH)
        )


def test_operands_that_change_after_a_good_call_are_looked_at_again() -> None:
    pool, wider = (KVPool(KVLayout(2, heads, WIDTH, WIDTH, KVMode.INT8), 9) for heads in (KV_HEADS, 2 * KV_HEADS))
    inputs = step([1, 1], [40, 17], torch.tensor([[3, 1, 5, 6], [2, 4, 7, 8]], dtype=torch.int32))
    pool.storage.zero_()
    heads = torch.randn(2, HEADS + 2 * KV_HEADS, WIDTH)
    (q, k, v), out, op = heads.split((HEADS, KV_HEADS, KV_HEADS), 1), torch.empty(2, HEADS, WIDTH), make_op()

    def call(v: torch.Tensor, pages: LayerPages, inputs: ForwardInputs, cos_sin: torch.Tensor) -> None:
        op(q, k, v, pages, inputs, cos_sin=cos_sin, scale=1.0, out=out)

    good = v, pool.view(0), inputs, torch.ones(64, WIDTH)
    call(*good)
    call(v, pool.view(1), inputs, good[3])
    for bad, what in (
        ((v[..., :32], *good[1:]), "got v"),
        ((v, wider.view(0), *good[2:]), "got k"),
        ((*good[:2], replace(inputs, slots=inputs.slots.int()), good[3]), "got slots"),
        ((*good[:3], good[3].double()), "got cos_sin"),
    ):
        with pytest.raises(GenerationError, match=f"qkv_attention: {what}"):
            call(*bad)
    call(*good)
