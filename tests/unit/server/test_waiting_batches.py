"""The set of waiting batches while two threads change it: nothing is lost, and nobody stumbles."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from deepseek_tgi.server.waiting_batches import WaitingBatches


@pytest.fixture
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_generations_batches_go_and_the_others_stay() -> None:
    batches = WaitingBatches()
    for generation, batch_id in ((1, 0), (2, 0), (None, 0), (2, 7)):
        batches.add(generation, batch_id)
    batches.drop_all(2)
    batches.drop(1, [0, 5])
    assert batches
    batches.drop(2, [0, 7])
    batches.drop(None, [0])
    assert not batches
    batches.add(3, 1)
    batches.drop_all(None)
    assert not batches


def test_what_one_thread_adds_is_not_lost_while_another_forgets_a_generation(eager_switching: None) -> None:
    """The engine's thread keeps its batches; meanwhile the event loop drops those of models that were unloaded."""
    batches, stop, failures = WaitingBatches(), threading.Event(), list[RuntimeError]()

    def unload() -> None:
        try:
            while not stop.is_set():
                batches.drop_all(99)
        except RuntimeError as error:  # of a set that changes while it is walked
            failures.append(error)

    other = threading.Thread(target=unload)
    other.start()
    lost = 0
    for batch_id in range(20_000):
        batches.add(1, batch_id)
        lost += not batches
        batches.drop(1, [batch_id])
    for batch_id in range(2_000):
        batches.add(1, batch_id)  # a large set takes long to walk
    kept = len(batches._keys)
    stop.set()
    other.join()
    assert failures == []
    assert (lost, kept) == (0, 2_000)
