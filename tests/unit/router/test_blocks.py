"""The block allocator: one owner a block, prefixes only of what was computed, least recently used leaves first."""

from __future__ import annotations

import random
import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from deepseek_tgi.router.blocks import Allocation, BlockAllocator

SIZE = 4


def prompt(*blocks: int, rest: int = 0) -> list[int]:
    """A prompt of whole blocks, each filled with one number, and `rest` more tokens."""
    return [number for number in blocks for _ in range(SIZE)] + [99] * rest


def admitted(allocator: BlockAllocator, ids: list[int], new: int = 1, computed: bool = True) -> Allocation:
    found = allocator.allocate(len(ids) + new - 1, ids)
    assert found is not None
    if computed:
        allocator.commit(found)
    return found


def test_block_zero_is_never_given_out_and_slots_follow_blocks() -> None:
    allocator = BlockAllocator(8, SIZE, prefix_caching=True)
    found = allocator.allocate(25, None)
    assert found is not None
    assert sorted(found.blocks) == [1, 2, 3, 4, 5, 6, 7]
    assert len(found.slots) == 25
    assert found.slots == [found.blocks[p // SIZE] * SIZE + p % SIZE for p in range(25)]
    assert allocator.allocate(1, None) is None


def test_a_committed_prompt_is_reused_by_whole_blocks() -> None:
    allocator = BlockAllocator(32, SIZE, prefix_caching=True)
    first = admitted(allocator, prompt(1, 2, 3, rest=2))
    second = admitted(allocator, prompt(1, 2, 4, rest=3))
    assert second.cache_len == 2 * SIZE
    assert second.blocks[:2] == first.blocks[:2]
    assert not set(second.blocks[2:]) & set(first.blocks)


def test_a_prompt_that_is_wholly_stored_leaves_one_token_to_compute() -> None:
    allocator = BlockAllocator(32, SIZE, prefix_caching=True)
    allocator.release(admitted(allocator, prompt(1, 2)))
    assert admitted(allocator, prompt(1, 2)).cache_len == 2 * SIZE - 1


def test_a_long_prompt_of_small_blocks_is_stored_in_one_pass() -> None:
    allocator = BlockAllocator(200_001, 1, prefix_caching=True)
    found = allocator.allocate(200_000, range(200_000))
    assert found is not None
    started = time.process_time()
    allocator.commit(found)
    assert time.process_time() - started < 5, "not once for each block"
    assert found.private == []


def test_a_prompt_that_was_never_computed_is_not_reused() -> None:
    allocator = BlockAllocator(32, SIZE, prefix_caching=True)
    allocator.release(admitted(allocator, prompt(1, 2, 3), computed=False))
    assert admitted(allocator, prompt(1, 2, 3)).cache_len == 0


def test_requests_without_ids_neither_reuse_nor_store() -> None:
    allocator = BlockAllocator(32, SIZE, prefix_caching=True)
    allocator.release(admitted(allocator, prompt(1, 2)))
    plain = allocator.allocate(2 * SIZE, None)
    assert plain is not None
    assert plain.cache_len == 0
    allocator.commit(plain)
    allocator.release(plain)
    assert admitted(allocator, prompt(1, 2, 3)).cache_len == 2 * SIZE


def test_the_simple_allocator_never_reuses() -> None:
    allocator = BlockAllocator(32, SIZE, prefix_caching=False)
    allocator.release(admitted(allocator, prompt(1, 2)))
    assert admitted(allocator, prompt(1, 2)).cache_len == 0


def test_two_at_once_with_the_same_prompt_keep_their_own_blocks() -> None:
    allocator = BlockAllocator(32, SIZE, prefix_caching=True)
    one = admitted(allocator, prompt(1, 2), computed=False)
    two = admitted(allocator, prompt(1, 2), computed=False)
    allocator.commit(one)
    allocator.commit(two)
    assert not set(one.blocks) & set(two.blocks)
    allocator.release(one)
    allocator.check_integrity()
    allocator.release(two)
    allocator.check_integrity()
    assert allocator.available_blocks == allocator.usable_blocks


def test_the_least_recently_used_leaf_goes_first() -> None:
    allocator = BlockAllocator(7, SIZE, prefix_caching=True)  # six usable
    for blocks in ((1, 2), (1, 3), (5, 6)):
        allocator.release(admitted(allocator, prompt(*blocks)))
    allocator.release(admitted(allocator, prompt(1, 2)))  # used again: 1-3 is now the oldest leaf
    taken = allocator.allocate(2 * SIZE, None)  # one is free, one must be evicted
    assert taken is not None
    allocator.release(taken)
    assert admitted(allocator, prompt(1, 2, rest=1)).cache_len == 2 * SIZE
    assert admitted(allocator, prompt(1, 3, rest=1)).cache_len == SIZE


def test_what_is_in_use_is_never_evicted() -> None:
    allocator = BlockAllocator(5, SIZE, prefix_caching=True)
    held = admitted(allocator, prompt(1, 2))
    assert allocator.allocate(3 * SIZE, None) is None
    allocator.release(held)
    assert allocator.allocate(3 * SIZE, None) is not None


def test_releasing_twice_changes_nothing() -> None:
    allocator = BlockAllocator(8, SIZE, prefix_caching=True)
    found = admitted(allocator, prompt(1))
    allocator.release(found)
    before = allocator.available_blocks
    allocator.release(found)
    allocator.commit(found)
    assert allocator.available_blocks == before == allocator.usable_blocks
    allocator.check_integrity()


def test_stale_candidates_for_eviction_do_not_pile_up() -> None:
    allocator = BlockAllocator(8, SIZE, prefix_caching=True)
    for _ in range(5000):
        allocator.release(admitted(allocator, prompt(1, 2)))
    assert len(allocator._leaves) <= 64 + 4 * 8 + 1


class Traffic(RuleBasedStateMachine):
    """Any interleaving of admissions, successes, failures and ends, over few prompts so that they collide."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(14, SIZE, prefix_caching=True)
        self.held: list[Allocation] = []
        self.computed: set[tuple[int, ...]] = set()
        self.ids: dict[int, list[int]] = {}

    @rule(
        target=live,
        blocks=st.lists(st.integers(0, 2), max_size=4),
        rest=st.integers(0, 3),
        new=st.integers(1, 6),
        cached=st.booleans(),
    )
    def admit(self, blocks: list[int], rest: int, new: int, cached: bool) -> Allocation | None:
        ids = prompt(*blocks, rest=rest) or [1]
        before = self.allocator.available_blocks
        found = self.allocator.allocate(len(ids) + new - 1, ids if cached else None)
        needed = -(-(len(ids) + new - 1) // SIZE)
        if found is None:
            assert before < needed, "refused although there was room"
            return None
        assert len(found.blocks) == needed
        assert found.cache_len < len(ids)
        whole = (found.cache_len + SIZE - 1) // SIZE  # a full hit counts its last block, less one token
        assert all(tuple(ids[: (i + 1) * SIZE]) in self.computed for i in range(whole)), "claims what was not computed"
        self.held.append(found)
        self.ids[id(found)] = ids if cached else []
        return found

    @rule(allocation=live)
    def succeed(self, allocation: Allocation | None) -> None:
        if allocation is None or allocation.released:
            return
        self.allocator.commit(allocation)
        ids = self.ids[id(allocation)]
        self.computed |= {tuple(ids[: (i + 1) * SIZE]) for i in range(len(ids) // SIZE)}

    @rule(allocation=consumes(live))
    def end(self, allocation: Allocation | None) -> None:
        if allocation is not None and not allocation.released:
            self.allocator.release(allocation)
            self.held.remove(allocation)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        self.allocator.check_integrity()
        private = [block for allocation in self.held for block in allocation.private]
        # One that computed its own copy of a stored prompt holds the stored blocks as well: its next ones hang there.
        stored = {node.block for allocation in self.held for node in allocation.path}
        shared = stored | {block for allocation in self.held for block in allocation.blocks} - set(private)
        assert len(set(private)) == len(private), "two requests own a block"
        assert not shared & set(private), "a block is shared and private at once"
        in_use = len(shared) + len(private)
        assert self.allocator.available_blocks + in_use >= self.allocator.usable_blocks
        assert self.allocator.available_blocks <= self.allocator.usable_blocks

    def teardown(self) -> None:
        for allocation in self.held:
            self.allocator.release(allocation)
        assert self.allocator.available_blocks == self.allocator.usable_blocks


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_long_random_day_loses_nothing() -> None:
    dice = random.Random(3)
    allocator = BlockAllocator(40, SIZE, prefix_caching=True)
    held: list[Allocation] = []
    for _ in range(20_000):
        if held and dice.random() < 0.5:
            allocator.release(held.pop(dice.randrange(len(held))))
            continue
        ids = prompt(*(dice.randrange(3) for _ in range(dice.randrange(6))), rest=dice.randrange(1, 4))
        found = allocator.allocate(len(ids) + dice.randrange(8), ids)
        if found is not None:
            if dice.random() < 0.8:
                allocator.commit(found)
            held.append(found)
    allocator.check_integrity()
    for allocation in held:
        allocator.release(allocation)
    assert allocator.available_blocks == allocator.usable_blocks
