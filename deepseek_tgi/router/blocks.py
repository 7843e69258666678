"""The KV block allocator: the one owner of the free list, with prefix reuse by whole blocks.

Choice: a trie with one block a node, keyed by the block's own token ids, so that equality is exact and eviction takes
single blocks. A prompt enters the trie only when the shard has answered with its first token. That prevents claiming
prefixes that were never computed, which inserting at release does for requests that were put back or failed.
Rejected: nodes that span several blocks, which need splitting and buy nothing at these sizes.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

ID_BYTES = 4


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    """One cached block. `refs` counts the live allocations that use it or a block below it."""

    block: int
    parent: _Node | None
    key: bytes
    children: dict[bytes, _Node] = field(default_factory=dict)
    refs: int = 0
    last_use: int = 0
    cached: bool = True


@dataclass(slots=True, eq=False, repr=False)
class Allocation:
    """Blocks of one request, in sequence order; token position p lives in `slots[p]`.

    The first `cache_len` prompt tokens are stored already. `keys` are the prompt's whole blocks, empty for a request
    that takes no part in prefix reuse. Made, committed and released by `BlockAllocator` alone.
    """

    blocks: list[int]
    slots: list[int]
    cache_len: int
    keys: list[bytes]
    path: list[_Node]
    private: list[int]
    released: bool = False


class BlockAllocator:
    """Owner of blocks 1 … num_blocks-1; block 0 is kept for the liveness request and never given out.

    Each of them is at any time in exactly one place: the free list, one live allocation, or the prefix trie.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = list(range(num_blocks - 1, 0, -1))
        self._withheld: set[int] = set()
        self._root = _Node(block=0, parent=None, key=b"", refs=1)
        self._idle = 0  # cached blocks that no live allocation uses: all of them can be evicted, leaves first
        self._leaves: list[tuple[int, int, _Node]] = []  # heap of evictable leaves; stale items are skipped
        self._clock = 0
        self._pushes = 0  # breaks ties in the heap

    @property
    def usable_blocks(self) -> int:
        """Most blocks one request can ever get."""
        return max(0, self.num_blocks - 1)

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or held only by the prefix cache."""
        return len(self._free) + self._idle

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] | None) -> Allocation | None:
        """Reserve room for `num_tokens`, reusing what is cached of `prompt_ids`; None if there is not enough now.

        `prompt_ids` None keeps the request out of the prefix cache. At least one prompt token is left to compute.
        """
        keys = self._keys(prompt_ids)
        path = self._lookup(keys)
        needed = self.blocks_for(num_tokens) - len(path)
        idle_in_path = sum(node.refs == 0 for node in path)
        if needed > len(self._free) + self._idle - idle_in_path:
            return None
        self._acquire(path)
        while len(self._free) < needed:
            self._evict_one()
        private = [self._free.pop() for _ in range(needed)]
        blocks = [node.block for node in path] + private
        cache_len = len(path) * self.block_size
        if prompt_ids is not None and cache_len and cache_len == len(prompt_ids):
            cache_len -= 1
        return Allocation(blocks, self._slots(blocks, num_tokens), cache_len, keys, path, private)

    def commit(self, allocation: Allocation) -> None:
        """Put the prompt's whole blocks into the prefix cache; call once its K/V has been computed."""
        if allocation.released:
            return
        parent = allocation.path[-1] if allocation.path else self._root
        stored: set[int] = set()
        for index in range(len(allocation.path), len(allocation.keys)):
            key = allocation.keys[index]
            node = parent.children.get(key)
            if node is None:
                block = allocation.blocks[index]
                stored.add(block)
                node = _Node(block=block, parent=parent, key=key)
                parent.children[key] = node
                self._idle += 1
            self._acquire([node])
            allocation.path.append(node)
            parent = node
        allocation.private = [block for block in allocation.private if block not in stored]

    def release(self, allocation: Allocation) -> None:
        """Give an allocation back; a second call does nothing."""
        if allocation.released:
            return
        allocation.released = True
        self._free.extend(allocation.private)
        self._clock += 1
        for node in allocation.path:
            node.refs -= 1
            node.last_use = self._clock
            if node.refs == 0:
                self._idle += 1
                self._offer(node)

    def withhold(self, keep: int) -> list[int]:
        """Take blocks out of use, evicting what is only cached, until `keep` are available; which ones."""
        taken = max(0, self.available_blocks - max(0, keep))
        while len(self._free) < taken:
            self._evict_one()
        withheld = [self._free.pop() for _ in range(taken)]
        self._withheld.update(withheld)
        return withheld

    def restore(self, blocks: Sequence[int]) -> None:
        """Put withheld blocks back into use."""
        self._withheld.difference_update(blocks)
        self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a block has two places or a count is wrong (tests, idle checks)."""
        cached: list[int] = []
        idle = 0
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            cached.append(node.block)
            idle += node.refs == 0
            assert node.parent is not None
            assert node.parent.refs or not node.refs, "a block is in use below one that is not"
            stack.extend(node.children.values())
        owned = [*self._free, *cached, *self._withheld]
        assert len(set(owned)) == len(owned), "a block is in two places"
        assert 0 not in owned, "block 0 was given out"
        assert idle == self._idle, f"{idle} idle cached blocks, counted {self._idle}"

    def _keys(self, prompt_ids: Sequence[int] | None) -> list[bytes]:
        if prompt_ids is None or not self.prefix_caching:
            return []
        data = array("I", prompt_ids).tobytes()
        step = self.block_size * ID_BYTES
        return [data[i : i + step] for i in range(0, len(data) - step + 1, step)]

    def _lookup(self, keys: list[bytes]) -> list[_Node]:
        path: list[_Node] = []
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _acquire(self, path: list[_Node]) -> None:
        self._clock += 1
        for node in path:
            self._idle -= node.refs == 0
            node.refs += 1
            node.last_use = self._clock

    def _offer(self, node: _Node) -> None:
        if node is self._root or node.refs or node.children:
            return
        if len(self._leaves) > 64 + 4 * self.num_blocks:
            self._leaves = [item for item in self._leaves if self._evictable(item)]
            heapq.heapify(self._leaves)
        self._pushes += 1
        heapq.heappush(self._leaves, (node.last_use, self._pushes, node))

    def _evictable(self, item: tuple[int, int, _Node]) -> bool:
        node = item[2]
        return node.cached and node.refs == 0 and not node.children and node.last_use == item[0]

    def _evict_one(self) -> None:
        while True:
            item = heapq.heappop(self._leaves)
            if self._evictable(item):
                break
        node = item[2]
        parent = node.parent
        assert parent is not None
        node.cached = False
        del parent.children[node.key]
        self._idle -= 1
        self._free.append(node.block)
        self._offer(parent)

    def _slots(self, blocks: list[int], num_tokens: int) -> list[int]:
        slots: list[int] = []
        for block in blocks:
            slots.extend(range(block * self.block_size, (block + 1) * self.block_size))
        return slots[:num_tokens]
