"""Which of a Prefill's new requests enter, with which blocks and how many tokens first."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass

from deepseek_tgi.core import Generation, Request
from deepseek_tgi.engine.batch import Batch
from deepseek_tgi.engine.config import FIRST_BLOCK, MAX_PROMPT_LOGIT_ROWS, Counter
from deepseek_tgi.engine.intake import CacheShape, Intake
from deepseek_tgi.engine.report import ended_early
from deepseek_tgi.engine.runner import Runner
from deepseek_tgi.engine.sequence import Sequence
from deepseek_tgi.errors import RequestError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Sequences to run, and the reports of requests that cannot."""

    sequences: list[Sequence]
    refused: list[Generation]


class Admission:
    """Takes new requests in. A request that is wrong fails its call only if it is alone in it.

    The router fails every running request when a call fails. So beside others a wrong request ends at once with an end
    token, no text and no logprob; the reason is logged and counted in `requests_failed`.
    """

    def __init__(self, intake: Intake, end_id: int, counter: Counter) -> None:
        self._intake = intake
        self._end_id = end_id
        self._counter = counter

    def admit(self, runner: Runner, requests: Items[Request], joined: Items[Batch], others: bool) -> Admitted:
        """Sequences for `requests`, which run together with `joined`; `others` says that any batch is alive.

        Raises: `RequestError` for the only request of a call, or for requests without blocks beside others.
        """
        numbered = _without_blocks(requests, others)
        shape = CacheShape(runner.pool.num_blocks, runner.pool.layout.block_size)
        next_block = FIRST_BLOCK
        sequences: list[Sequence] = []
        refused: list[Generation] = []
        for request in requests:
            try:
                sequence = self._intake.sequence(request, shape, runner.guard, next_block if numbered else None)
            except RequestError as error:
                self._counter("requests_failed", 1)
                if len(requests) == 1 and not joined:
                    raise
                log.error("request %d ends before it starts, the rest of its batch goes on: %s", request.id, error)
                refused.append(ended_early(request.id, self._end_id, "", 0))
                continue
            next_block += len(sequence.blocks)
            sequences.append(sequence)
        _grant(sequences, runner.max_prefill_tokens - sum(b.current_tokens for b in joined))
        return Admitted(sequences, refused)


def _without_blocks(requests: Items[Request], others: bool) -> bool:
    """True if the engine must number blocks itself, as for the router's warm-up and its benchmark tool."""
    without = [r.id for r in requests if not r.blocks]
    if without and (others or len(without) < len(requests)):
        raise RequestError(
            f"requests {without} came without blocks; that works for one batch at a time, in which no request has any"
        )
    return bool(without)


def _grant(sequences: Items[Sequence], budget: int) -> None:
    """Bound the prompt tokens that are scored, and let prompts whose cached prefix was not there use what is left.

    The rest of the plan is the router's: without `chunk_len` a prompt is computed to its end.
    """
    scored = MAX_PROMPT_LOGIT_ROWS
    for sequence in sequences:
        if sequence.prompt_logprobs is not None:
            sequence.next_tokens = max(1, min(sequence.next_tokens, scored))
            scored -= sequence.next_tokens
    spare = budget - sum(s.next_tokens for s in sequences)
    for sequence in sequences:
        missing = sequence.remaining - sequence.next_tokens
        if missing and spare > 0 and sequence.request.chunk_len is None and sequence.prompt_logprobs is None:
            sequence.next_tokens += min(missing, spare)
            spare -= min(missing, spare)
