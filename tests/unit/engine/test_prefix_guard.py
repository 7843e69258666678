"""A slot vouches for exactly one history, against a plain dictionary of whole histories."""

from __future__ import annotations

import random

import torch

from deepseek_tgi.engine.prefix_guard import PrefixGuard


class Model:
    """What the guard stands for: the full token history of each slot."""

    def __init__(self) -> None:
        self.histories: dict[int, tuple[int, ...]] = {}

    def verified(self, ids: list[int], slots: list[int]) -> int:
        for i, slot in enumerate(slots):
            if self.histories.get(slot) != tuple(ids[: i + 1]):
                return i
        return len(ids)


def write(guard: PrefixGuard, ids: list[int], slots: list[int], start: int = 0) -> None:
    positions = torch.arange(start, len(ids))
    numbers = guard.numbers(torch.tensor(ids[start:]), positions).cumsum(0)
    if start:
        numbers += guard.history(torch.tensor([slots[start - 1]]))
    guard.remember(torch.tensor(slots[start:]), numbers)


def test_random_writes_and_claims_agree_with_whole_histories() -> None:
    rng = random.Random(5)
    guard, model = PrefixGuard(64), Model()
    told: list[int] = []
    for _ in range(1500):
        n = rng.randrange(1, 12)
        ids = [rng.randrange(3) for _ in range(n)]
        slots = rng.sample(range(64), n)
        if rng.random() < 0.5 and told:
            slots = (told + [s for s in slots if s not in told])[:n]
        if rng.random() < 0.3:
            write(guard, ids, slots)
            told = slots
            for i, slot in enumerate(slots):
                model.histories[slot] = tuple(ids[: i + 1])
        else:
            assert guard.verified(torch.tensor(ids), torch.tensor(slots)) == model.verified(ids, slots)


def test_a_history_written_in_parts_is_the_whole() -> None:
    guard = PrefixGuard(32)
    ids, slots = [7, 7, 1, 5], [9, 3, 20, 4]
    write(guard, ids[:2], slots[:2])
    write(guard, ids, slots, start=2)
    assert guard.verified(torch.tensor(ids), torch.tensor(slots)) == 4


def test_same_tokens_in_another_order_or_place_are_another_history() -> None:
    guard = PrefixGuard(8)
    write(guard, [1, 2, 3], [0, 1, 2])
    assert guard.verified(torch.tensor([2, 1, 3]), torch.tensor([0, 1, 2])) == 0
    assert guard.verified(torch.tensor([1, 3, 2]), torch.tensor([0, 1, 2])) == 1
    assert guard.verified(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 2])) == 0


def test_forgotten_and_fresh_slots_vouch_for_nothing() -> None:
    guard = PrefixGuard(8)
    assert guard.verified(torch.tensor([0, 0]), torch.tensor([0, 1])) == 0
    write(guard, [1, 2], [0, 1])
    guard.forget(torch.tensor([1]))
    assert guard.verified(torch.tensor([1, 2]), torch.tensor([0, 1])) == 1


def test_numbers_depend_on_the_secret_alone() -> None:
    ids, positions = torch.tensor([5, 6]), torch.arange(2)
    one, two, three = (PrefixGuard(1, secret=s).numbers(ids, positions) for s in (1 << 70, 1 << 70, 2 << 70))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    assert not torch.equal(PrefixGuard(1).numbers(ids, positions), PrefixGuard(1).numbers(ids, positions))
