"""The decoder's scratch memory: shared, aligned, grown once."""

from __future__ import annotations

from typing import Any

import torch

from deepseek_tgi.adapters.layers.part import Part, StepContext, cut
from deepseek_tgi.adapters.models.decoder import KEPT_SIZES, Scratch


class Stub(Part):
    """A part with buffers of the given widths that does nothing."""

    nbytes = 0

    def __init__(self, *widths: int) -> None:
        self._widths = widths

    def scratch_floats(self, num_tokens: int) -> int:
        return num_tokens * 16 * sum(-(-w // 16) for w in self._widths)

    @property
    def binding(self) -> tuple[Any, ...]:
        return self._widths

    def bind(self, scratch: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(cut(scratch, num_tokens, self._widths))

    def __call__(self, hidden: torch.Tensor, buffers: tuple[torch.Tensor, ...], step: StepContext) -> None:
        raise NotImplementedError


def test_buffers_of_a_part_are_dense_aligned_and_apart() -> None:
    scratch = Scratch([Stub(5, 33, 1)], torch.device("cpu"))
    buffers = scratch.cut(7)[0]
    assert [tuple(b.shape) for b in buffers] == [(7, 5), (7, 33), (7, 1)]
    for number, buffer in enumerate(buffers):
        assert buffer.is_contiguous()
        assert buffer.data_ptr() % 64 == 0
        buffer.fill_(number)
    assert [float(b.mean()) for b in buffers] == [0, 1, 2], "no buffer overlaps another"


def test_parts_use_the_same_memory_one_after_the_other() -> None:
    scratch = Scratch([Stub(64, 16), Stub(16), Stub(64, 16)], torch.device("cpu"))
    first, second, third = scratch.cut(3)
    assert scratch.floats(3) == 3 * 80
    assert first[0].data_ptr() == second[0].data_ptr()
    assert first is third, "layers of one shape share one cut"


def test_memory_grows_to_the_largest_step_and_cuts_follow_it() -> None:
    scratch = Scratch([Stub(64)], torch.device("cpu"))
    small = scratch.cut(1)
    assert scratch.cut(1) is small, "the same step size is not cut again"
    large = scratch.cut(100)
    moved = scratch.cut(1)
    assert moved[0][0].data_ptr() == large[0][0].data_ptr(), "a cut of memory that was given back is not used"
    for size in range(2, 2 + 2 * KEPT_SIZES):
        scratch.cut(size)
    assert scratch.cut(100)[0][0].data_ptr() == large[0][0].data_ptr(), "forgetting a cut frees no memory"
