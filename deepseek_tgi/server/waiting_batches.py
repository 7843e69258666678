"""Which batches wait for their next step: added by the engine's thread, taken away by it and by the event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterable

BatchKey = tuple[int | None, int]
"""The generation that a call named, and the batch's id."""


class WaitingBatches:
    """Owner of the set. Every change is whole: who reads and writes back loses what another adds meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[BatchKey] = set()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, generation: int | None, batch_id: int) -> None:
        """A batch waits."""
        with self._lock:
            self._keys.add((generation, batch_id))

    def drop(self, generation: int | None, batch_ids: Iterable[int]) -> None:
        """These do not; unknown ones are fine."""
        keys = {(generation, batch_id) for batch_id in batch_ids}
        with self._lock:
            self._keys -= keys

    def drop_all(self, generation: int | None) -> None:
        """None of a generation does; without one, none at all."""
        with self._lock:
            self._keys = {key for key in self._keys if generation is not None and key[0] != generation}
