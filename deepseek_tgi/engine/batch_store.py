"""The batches between two calls."""

from __future__ import annotations

from deepseek_tgi.engine.batch import Batch
from deepseek_tgi.errors import BatchNotFoundError


class BatchStore:
    """Owner of all cached batches, by id (0 is an id like any other); used by the engine's thread alone."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._batches

    def put(self, batch: Batch) -> None:
        """Keep `batch` under its id; an older one of that id is forgotten."""
        self._batches[batch.id] = batch

    def get(self, batch_id: int) -> Batch:
        """Look without taking. Raises `BatchNotFoundError`."""
        try:
            return self._batches[batch_id]
        except KeyError:
            raise BatchNotFoundError(
                f"batch {batch_id} is not cached; expected one of {sorted(self._batches)} (a batch is used up by each "
                "Prefill or Decode that names it, and dropped if that call fails)"
            ) from None

    def take(self, batch_ids: list[int]) -> list[Batch]:
        """Remove and return the named batches. If one is missing the others are gone all the same.

        Raises: `BatchNotFoundError` for an unknown id or one named twice.
        """
        found = []
        missing = None
        for batch_id in batch_ids:
            try:
                found.append(self.get(batch_id))
                self.drop(batch_id)
            except BatchNotFoundError as error:
                missing = missing or error
        if missing is not None:
            raise missing
        return found

    def drop(self, batch_id: int) -> None:
        """Forget one batch; an unknown id is fine."""
        self._batches.pop(batch_id, None)

    def drop_all(self) -> None:
        """Forget every batch."""
        self._batches.clear()
