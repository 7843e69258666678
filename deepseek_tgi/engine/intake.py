"""From a request to a sequence: tokens, checked blocks and slots, a verified prefix, fresh state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import HEALTH_REQUEST_ID, Request
from deepseek_tgi.engine.config import FIRST_BLOCK, MAX_PROMPT_LOGIT_ROWS, Counter, EngineConfig, blocks_for
from deepseek_tgi.engine.prefix_guard import PrefixGuard
from deepseek_tgi.engine.sequence import Sequence
from deepseek_tgi.engine.stopping import StopState
from deepseek_tgi.errors import RequestError, ResourceError
from deepseek_tgi.logits.grammar import GrammarCompiler
from deepseek_tgi.logits.pipeline import sampling_state
from deepseek_tgi.text.detokenize import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What requests are checked against."""

    num_blocks: int
    block_size: int


class Intake:
    """Makes sequences for one model. Its grammar cache is its only state; used by the engine's thread alone."""

    def __init__(self, adapter: ModelAdapter, config: EngineConfig, counter: Counter) -> None:
        self._tokenizer = adapter.tokenizer
        self._eos_token_ids = adapter.eos_token_ids
        self._max_positions = adapter.info.max_position_embeddings
        self._vocab_size = adapter.info.vocab_size
        self._config = config
        self._counter = counter
        self._grammars = GrammarCompiler(adapter.tokenizer, adapter.info.vocab_size, adapter.eos_token_ids)

    def sequence(self, request: Request, shape: CacheShape, guard: PrefixGuard, first_block: int | None) -> Sequence:
        """A sequence that is ready for its first step.

        `first_block` numbers the blocks of a request that brings none. Raises: `RequestError` naming the request and
        what is wrong; `ResourceError` if the numbered blocks do not fit.
        """
        ids = self._tokenizer.encode(request.text, request.add_special_tokens, request.truncate)
        needed = len(ids) + request.stop.max_new_tokens - 1
        self._check_prompt(request, ids, needed)
        if first_block is None:
            blocks = _given_blocks(request, needed, shape)
        else:
            blocks = _numbered_blocks(request, needed, shape, first_block)
        params = request.sampling
        constraint = self._grammars.constraint(params.grammar_type, params.grammar)
        sequence = Sequence(
            request=request,
            ids=ids,
            prompt_length=len(ids),
            blocks=blocks,
            sampling=sampling_state(params, ids, request.top_n_tokens, constraint),
            detokenizer=IncrementalDetokenizer(self._tokenizer, ids),
            stopping=StopState(request.stop, self._eos_token_ids),
        )
        self._start(sequence, guard, shape.block_size)
        return sequence

    def _check_prompt(self, request: Request, ids: list[int], needed: int) -> None:
        if not ids:
            raise RequestError(f"request {request.id}: the prompt has no tokens, expected at least one")
        if request.stop.max_new_tokens < 1:
            got = request.stop.max_new_tokens
            raise RequestError(f"request {request.id}: max_new_tokens: got {got}, expected at least 1")
        if needed > self._max_positions:
            raise RequestError(
                f"request {request.id}: {len(ids)} prompt tokens and max_new_tokens {request.stop.max_new_tokens} need "
                f"{needed} positions, the model has {self._max_positions}"
            )
        if max(ids) >= self._vocab_size:
            raise RequestError(
                f"request {request.id}: the prompt has token {max(ids)}, the model knows 0 to {self._vocab_size - 1} "
                "(its tokenizer has ids without an embedding): leave that text out"
            )

    def _start(self, sequence: Sequence, guard: PrefixGuard, block_size: int) -> None:
        """Believe of the claimed prefix what is really stored, and plan the first step."""
        request = sequence.request
        claimed = min(request.cache_len, sequence.prompt_length - 1)
        planned = request.chunk_len or sequence.prompt_length - claimed
        if claimed:
            ids = torch.tensor(sequence.ids[:claimed])
            sequence.cache_len = guard.verified(ids, sequence.slots(0, claimed, block_size))
            self._counter("prefix_tokens_reused", sequence.cache_len)
            if sequence.cache_len < claimed:
                self._counter("prefix_tokens_rejected", claimed - sequence.cache_len)
        sequence.next_tokens = max(1, min(planned, sequence.remaining))
        if request.prefill_logprobs and self._config.request_logprobs:
            # Nothing precedes the first token, and what was not computed has no logprob.
            sequence.prompt_logprobs = [float("nan")] * (sequence.cache_len + 1)
            sequence.next_tokens = min(sequence.next_tokens, MAX_PROMPT_LOGIT_ROWS)


def _given_blocks(request: Request, needed: int, shape: CacheShape) -> torch.Tensor:
    """The router's blocks, checked against its slots and the pool."""
    where = f"request {request.id}"
    first = 0 if request.id == HEALTH_REQUEST_ID else FIRST_BLOCK
    if len(request.slots) < needed:
        raise RequestError(
            f"{where}: got {len(request.slots)} slots, expected at least {needed}: its prompt has "
            f"{needed - request.stop.max_new_tokens + 1} tokens here and max_new_tokens is "
            f"{request.stop.max_new_tokens}; do router and shard use the same tokenizer files?"
        )
    blocks = torch.tensor(request.blocks, dtype=torch.int64)
    if int(blocks.min()) < first or int(blocks.max()) >= shape.num_blocks:
        raise RequestError(
            f"{where}: blocks {int(blocks.min())} to {int(blocks.max())}, expected {first} to {shape.num_blocks - 1}"
        )
    if len(set(request.blocks)) < len(request.blocks):
        double = next(b for b in request.blocks if request.blocks.count(b) > 1)
        raise RequestError(f"{where}: block {double} appears twice, expected one place for each position")
    positions = torch.arange(len(request.slots))
    if int(positions[-1]) // shape.block_size >= len(blocks):
        raise RequestError(
            f"{where}: {len(request.slots)} slots do not fit in {len(blocks)} blocks of {shape.block_size}"
        )
    expected = blocks[positions // shape.block_size] * shape.block_size + positions % shape.block_size
    wrong = (torch.tensor(request.slots, dtype=torch.int64) != expected).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise RequestError(
            f"{where}: slot {at} is {request.slots[at]}, expected {int(expected[at])} from block "
            f"{request.blocks[at // shape.block_size]} of {shape.block_size} slots"
        )
    return blocks.int()


def _numbered_blocks(request: Request, needed: int, shape: CacheShape, first_block: int) -> torch.Tensor:
    count = blocks_for(needed, shape.block_size)
    if first_block + count > shape.num_blocks:
        raise ResourceError(
            f"request {request.id} came without blocks and needs {count} of {shape.block_size} slots from block "
            f"{first_block} on; the cache has {shape.num_blocks} blocks; send fewer or shorter requests at once"
        )
    return torch.arange(first_block, first_block + count, dtype=torch.int32)
