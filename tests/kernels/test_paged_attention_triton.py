"""Paged attention in Triton, interpreted, against the textbook formula in float64 over what the pages hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_cases import Case, Geometry, expected, make_case

from deepseek_tgi.kernels.common import ComputeDtype
from deepseek_tgi.kernels.device_set import operators
from deepseek_tgi.kernels.paged_attention.triton import MODES, TiledAttention
from deepseek_tgi.kv.layout import KVMode

triton = pytest.importorskip("triton")

TORCH = operators(torch.device("cpu"), ComputeDtype.FLOAT32)
QUANTISED = [mode for mode in KVMode if mode.quantised]
LITTLE = 99 << 10
"""Bytes of shared memory of a block of sm_86, sm_89 and sm_120 (CUDA programming guide, technical specifications)."""
CLOSE = {KVMode.FLOAT16: 2.0**-10, KVMode.INT4: 2.0**-6}
"""What 16-bit operands change a result by, as a part of the largest value; INT4's values are rounded as well."""


def check(case: Case, mode: KVMode, unpacked_bytes: int = 0, attend: TiledAttention | None = None) -> None:
    """As in the interpreter: conversions to bfloat16 cut there, so a step is twice as large."""
    case = replace(case, q=case.q.bfloat16())
    attend = attend or TiledAttention(TORCH.paged_attention, interpreted=True, unpacked_bytes=unpacked_bytes)
    out = torch.full((*case.q.shape[:2], case.pool.view(1).v_dim), float("nan"))
    got = attend(case.q, case.pool.view(1), case.inputs, case.scale, out, placed=case.placed)
    want = expected(replace(case, q=case.q.float()))
    assert got is out
    assert np.abs(got.double().numpy() - want).max() <= CLOSE.get(mode, 2.0**-7) * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("mode", [KVMode(mode) for mode in MODES], ids=lambda m: m.value)
@pytest.mark.parametrize(
    "geometry", [(6, 2, 64, 32, 16), (7, 1, 96, 96, 32)], ids=["H6-G2-D64-V32", "H7-G1-D96-V96-S32"]
)
def test_prompts_chunks_and_single_tokens(mode: KVMode, geometry: Geometry) -> None:
    check(make_case(TORCH, geometry, ([13, 1, 0, 20], [0, 70, 9, 30]), mode), mode)


@pytest.mark.parametrize("mode", [KVMode(mode) for mode in MODES], ids=lambda m: m.value)
def test_a_decode_step(mode: KVMode) -> None:
    check(make_case(TORCH, (4, 1, 128, 64, 16), ([1, 1, 1], [15, 63, 140]), mode), mode)


@pytest.mark.parametrize("mode", QUANTISED, ids=lambda m: m.value)
def test_what_was_taken_off_a_key_is_back_when_it_is_read(mode: KVMode) -> None:
    for geometry in ((6, 2, 64, 32, 16), (2, 1, 96, 32, 16)):
        check(make_case(TORCH, geometry, ([5, 1, 18], [30, 75, 2]), mode, framed=True), mode)


def test_heads_of_no_common_size() -> None:
    check(make_case(TORCH, (3, 1, 72, 40, 16), ([9, 1], [40, 3]), KVMode.INT8), KVMode.INT8)


@pytest.mark.parametrize("mode", QUANTISED, ids=lambda m: m.value)
@pytest.mark.parametrize("framed", [False, True], ids=["plain", "framed"])
def test_contexts_read_into_bfloat16_first(mode: KVMode, framed: bool) -> None:
    for geometry in ((6, 2, 64, 32, 32), (2, 1, 96, 32, 16)):
        case = make_case(TORCH, geometry, ([5, 1, 0, 18], [30, 75, 4, 2]), mode, framed)
        check(case, mode, unpacked_bytes=1 << 30)


def test_one_op_takes_steps_of_every_kind_in_turn() -> None:
    attend = TiledAttention(TORCH.paged_attention, interpreted=True, unpacked_bytes=1 << 17)
    few, many, single = ([5, 1], [30, 75]), ([9, 3, 4], [2, 190, 300]), ([1, 1, 1], [15, 63, 140])
    for _ in range(2):
        for mode, batch, framed in (
            (KVMode.INT8, few, False), (KVMode.INT8, many, False), (KVMode.INT8, single, False),
            (KVMode.INT8, few, True), (KVMode.BFLOAT16, few, False), (KVMode.INT4, few, True),
        ):  # fmt: skip
            check(make_case(TORCH, (6, 2, 64, 32, 16), batch, mode, framed=framed), mode, attend=attend)
        check(make_case(TORCH, (4, 1, 64, 32, 16), few, KVMode.INT8), KVMode.INT8, attend=attend)


def test_tables_that_change_in_place_are_read_as_they_are() -> None:
    case = make_case(TORCH, (4, 2, 64, 32, 16), ([3, 20], [45, 28]), KVMode.INT8)  # three whole pages each
    q, used = case.q.bfloat16(), TiledAttention(TORCH.paged_attention, interpreted=True, unpacked_bytes=1 << 30)
    fresh = TiledAttention(TORCH.paged_attention, interpreted=True, unpacked_bytes=1 << 30)
    before = used(q, case.pool.view(1), case.inputs, case.scale)
    case.inputs.block_tables.copy_(case.inputs.block_tables.flip(1))
    after = used(q, case.pool.view(1), case.inputs, case.scale)
    assert torch.equal(after, fresh(q, case.pool.view(1), case.inputs, case.scale))
    off = np.abs(after.double().numpy() - expected(replace(case, q=q.float()))).max()
    assert off < 2.0**-6 < np.abs(after.double().numpy() - before.double().numpy()).max()


@pytest.mark.parametrize("mode", [KVMode.BFLOAT16, KVMode.INT8], ids=lambda m: m.value)
def test_a_gpu_with_little_shared_memory_gives_the_same(mode: KVMode) -> None:
    case = make_case(TORCH, (4, 1, 128, 128, 16), ([150, 2], [3, 70]), mode, framed=mode.quantised)
    attend = TiledAttention(TORCH.paged_attention, interpreted=True, unpacked_bytes=0, most_shared=LITTLE)
    check(case, mode, attend=attend)


def test_heads_that_little_shared_memory_does_not_hold_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    case = make_case(TORCH, (2, 1, 256, 256, 16), ([5, 1], [3, 20]), KVMode.INT4)
    attend = TiledAttention(TORCH.paged_attention, interpreted=True, most_shared=LITTLE)
    for _ in range(2):
        check(case, KVMode.INT4, attend=attend)
    told = "no Triton kernel for int4 heads of 256 elements in 101376 bytes of shared memory; torch does the work"
    assert [told in message for message in caplog.messages] == [True]
