"""What layers of a step share: kept by identity, and no longer than the step's own tensors live."""

from __future__ import annotations

import gc
from weakref import ref

import torch

from deepseek_tgi.kernels.seen import Seen


def test_the_same_objects_are_known_and_equal_ones_are_not() -> None:
    seen: Seen[str] = Seen()
    a, b = torch.zeros(2), torch.zeros(2)
    assert seen.of((a, b), 1) is None
    assert seen.note("made", (a, b), 1) == "made"
    assert seen.of((a, b), 1) == "made"
    assert seen.of((b, a), 1) is None
    assert seen.of((a, a.clone()), 1) is None
    assert seen.of((a,), 1) is None
    assert seen.of((a, b), 2) is None
    seen.note("other", (b, a), 1)
    assert seen.of((a, b), 1) is None


def test_what_was_known_is_let_go_and_never_taken_for_what_comes_after() -> None:
    seen: Seen[str] = Seen()
    a = torch.zeros(2)
    gone = ref(a)
    seen.note("made", (a,))
    del a
    gc.collect()
    assert gone() is None
    for _ in range(50):  # some of them lie where the first one lay
        assert seen.of((torch.zeros(2),)) is None
