"""A set of live requests under the id the router knows: built, filtered and joined as values."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from deepseek_tgi.core import CachedBatch
from deepseek_tgi.engine.config import MAX_PROMPT_LOGIT_ROWS
from deepseek_tgi.engine.sequence import Sequence
from deepseek_tgi.engine.step import DecodePlan
from deepseek_tgi.errors import RequestError


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests in the router's order. `plan` is the prepared state of pure decoding, None when it must be made anew.

    `max_tokens` counts the slots of distinct blocks, so that shared prefixes do not look like used memory twice.
    """

    id: int
    sequences: tuple[Sequence, ...]
    max_tokens: int
    plan: DecodePlan | None = None

    @property
    def current_tokens(self) -> int:
        """Tokens that the next step really feeds."""
        return sum(s.next_tokens for s in self.sequences)

    def cached(self) -> CachedBatch:
        """How the router is told of it."""
        ids = tuple(s.request.id for s in self.sequences)
        return CachedBatch(self.id, ids, self.max_tokens, self.current_tokens)


def make_batch(batch_id: int, sequences: Items[Sequence], block_size: int) -> Batch:
    """A batch of `sequences`. Raises `RequestError` if two carry the same request id."""
    ids = [s.request.id for s in sequences]
    if len(set(ids)) != len(ids):
        double = next(i for i in ids if ids.count(i) > 1)
        raise RequestError(f"batch {batch_id}: request id {double} appears twice, expected distinct ids")
    blocks = {block for s in sequences for block in s.blocks.tolist()}
    return Batch(batch_id, tuple(sequences), len(blocks) * block_size)


def concatenate(batches: Items[Batch], block_size: int) -> Batch:
    """All requests of `batches`, in order, under the first one's id."""
    if len(batches) == 1:
        return batches[0]
    return make_batch(batches[0].id, [s for b in batches for s in b.sequences], block_size)


def filtered(batch: Batch, request_ids: Items[int], block_size: int) -> Batch:
    """Exactly the requests named, in the order named.

    Raises: `RequestError` for no id, one that is named twice or one that is not in the batch.
    """
    by_id = {s.request.id: s for s in batch.sequences}
    unknown = [i for i in request_ids if i not in by_id]
    if not request_ids or unknown:
        raise RequestError(
            f"batch {batch.id}: cannot keep requests {list(request_ids)}: got "
            f"{f'unknown ids {unknown}' if unknown else 'an empty list'}, expected some of {list(by_id)}"
        )
    if tuple(request_ids) == tuple(by_id):
        return batch
    return make_batch(batch.id, [by_id[i] for i in request_ids], block_size)


def share_budget(sequences: Items[Sequence], max_prefill_tokens: int) -> None:
    """Decide what each request feeds next: one token when decoding, else a part of `max_prefill_tokens`.

    Every request gets at least one; what is left goes to unfinished prompts from the end of the list backwards, so that
    the newest, shortest waits end first, as TGI does.
    """
    spare = max(0, max_prefill_tokens - len(sequences))
    scored = MAX_PROMPT_LOGIT_ROWS
    for sequence in reversed(sequences):
        sequence.next_tokens = 1
        if not sequence.decoding:
            extra = min(sequence.remaining - 1, spare)
            if sequence.prompt_logprobs is not None:
                extra = max(0, min(extra, scored - 1))
                scored -= extra + 1
            sequence.next_tokens += extra
            spare -= extra
