"""One step of one batch: forward, choice, text, endings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from deepseek_tgi.adapters.base import ModelAdapter
from deepseek_tgi.core import ForwardInputs, Generation, StepTimings
from deepseek_tgi.engine.batch import Batch, make_batch, share_budget
from deepseek_tgi.engine.config import Counter, EngineConfig
from deepseek_tgi.engine.prefix_guard import PrefixGuard
from deepseek_tgi.engine.report import ended_early, take_token
from deepseek_tgi.engine.sequence import Sequence
from deepseek_tgi.engine.step import DecodePlan, RaggedStep, ragged_step
from deepseek_tgi.errors import DeepseekTgiError, GenerationError
from deepseek_tgi.kv.pool import KVPool
from deepseek_tgi.logits.pipeline import Choice, SamplingPlan, identity
from deepseek_tgi.logits.watermark import Watermark

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step gives: `batch` holds the requests that go on, None if all have ended."""

    generations: list[Generation]
    batch: Batch | None
    forward_ns: int
    decode_ns: int

    def timings(self, total_ns: int, concat_ns: int | None) -> StepTimings:
        """As the router's histograms want them."""
        return StepTimings(self.forward_ns, self.decode_ns, total_ns, concat_ns)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before anybody asked for it: the next of `sequences`, whose logits lie on the device."""

    sequences: Items[Sequence]
    cache_lens: list[int]
    logits: torch.Tensor

    def logits_of(self, sequences: Items[Sequence]) -> torch.Tensor | None:
        """What the next step of these requests gives; None if some of them, as far as they are now, are not here."""
        if sequences is self.sequences:
            return self.logits if self.cache_lens == [s.cache_len for s in sequences] else None
        places = {id(s): row for row, s in enumerate(self.sequences)}
        rows = [places.get(id(s), -1) for s in sequences]
        if any(row < 0 or self.cache_lens[row] != s.cache_len for row, s in zip(rows, sequences, strict=True)):
            return None
        return self.logits[rows]


class Runner:
    """Runs steps over one pool. Owns the pool's guard; batches are handed in and out.

    On a GPU the next step of a batch is launched before the answer to this one is on its way, and where the adapter
    can, before the chosen tokens are read back. Choice: it is what a router nearly always asks for next, of all
    requests or of those that have not ended, and what it writes is what their own next step would write; if another
    call comes first its logits are dropped and the step is taken again. Prevents: a GPU that idles while an answer
    travels and the next question comes, half of a step's time. Rejected: choosing tokens ahead as well, which would
    change what requests remember.

    Rule for one request's failure (its logits are not finite, its grammar allows nothing): the router knows only
    failures of a whole call, so if the request is alone its call fails with the reason, and otherwise it ends early
    with an end token without a logprob, counted in `requests_failed` and logged; its neighbours go on untouched.
    """

    def __init__(
        self, adapter: ModelAdapter, pool: KVPool, config: EngineConfig, counter: Counter, max_prefill_tokens: int
    ) -> None:
        self.pool = pool
        self.guard = PrefixGuard(pool.num_slots)
        self.max_prefill_tokens = max_prefill_tokens
        self._adapter = adapter
        self._config = config
        self._counter = counter
        self._block_size = pool.layout.block_size
        self._watermark = Watermark(config.watermark_gamma, config.watermark_delta)
        self._runs_ahead = adapter.info.device_type != "cpu" and adapter.ranks is None
        self._ahead: Ahead | None = None

    def run(self, batch: Batch) -> Stepped:
        """One step for every request of `batch`. Raises what the model raises; `batch` is then of no more use."""
        ahead, self._ahead = self._ahead, None
        if batch.plan is None and not all(s.decoding for s in batch.sequences):
            return self._run_ragged(batch)
        plan = batch.plan or self._plan(batch.sequences)
        start = time.perf_counter_ns()
        found = None if ahead is None else ahead.logits_of(batch.sequences)
        if found is not None:
            logits = found
            self.guard.remember(plan.inputs().slots, plan.history())
        else:
            inputs = plan.inputs()
            logits = self._forward(inputs, inputs.slots, plan.history)
        forwarded = time.perf_counter_ns()
        choosing = plan.sampling.begin(logits, self._adapter.best_of(logits))
        plan.move_on()
        unread = self._may_go_unread(batch.sequences, plan)
        ahead = self._launch_next(batch.sequences, plan, choosing.ids) if unread else None
        choice = choosing.result()
        plan.name(choice.token_ids)
        for sequence in batch.sequences:
            sequence.cache_len += 1
        generations, live = self._take(batch, batch.sequences, choice)
        if len(live) == len(batch.sequences):
            after: Batch | None = batch if batch.plan is plan else replace(batch, plan=plan)
        else:
            after = make_batch(batch.id, live, self._block_size) if live else None
        if ahead is None and self._runs_ahead and after is not None and after.plan is plan:
            ahead = self._launch_next(batch.sequences, plan)
        self._ahead = None if after is None else ahead
        return Stepped(generations, after, forwarded - start, time.perf_counter_ns() - forwarded)

    def drop_ahead(self) -> None:
        """Forget the step that was launched before anybody asked."""
        self._ahead = None

    def _launch_next(
        self, sequences: Items[Sequence], plan: DecodePlan, token_ids: torch.Tensor | None = None
    ) -> Ahead | None:
        """Launch the next step; with `token_ids` the tokens of this one are those, and only the device knows them yet.

        Its slots hold nothing that may be claimed until it is asked for. What goes wrong here goes wrong again for
        whoever asks.
        """
        inputs = plan.inputs()
        self.guard.forget(inputs.slots)
        cached = [s.cache_len + (token_ids is not None) for s in sequences]
        with suppress(DeepseekTgiError, RuntimeError):
            if token_ids is None:
                return Ahead(sequences, cached, self._adapter.step(inputs, self.pool))
            logits = self._adapter.step_with(inputs, token_ids, self.pool)
            return None if logits is None else Ahead(sequences, cached, logits)
        return None

    def _may_go_unread(self, sequences: Items[Sequence], plan: DecodePlan) -> bool:
        """Whether the next step may be launched before its tokens are read back: all of them must have a place."""
        if not self._runs_ahead or plan.sampling.reads_logits_late:
            return False
        return not any(s.stopping.at_last_token for s in sequences)

    def _plan(self, sequences: Items[Sequence]) -> DecodePlan:
        return DecodePlan(sequences, self.guard, self._block_size, self._sampling(sequences))

    def _sampling(self, sequences: Items[Sequence]) -> SamplingPlan:
        return SamplingPlan([s.sampling for s in sequences], self._watermark, identity)

    def _run_ragged(self, batch: Batch) -> Stepped:
        start = time.perf_counter_ns()
        step = ragged_step(batch.sequences, self.guard, self._block_size)
        logits = self._forward(step.inputs, step.written, lambda: step.history)
        forwarded = time.perf_counter_ns()
        _score_prompts(step, logits)
        for sequence in batch.sequences:
            sequence.cache_len += sequence.next_tokens
        generations: list[Generation] = []
        live: Items[Sequence] = batch.sequences
        if step.producing:
            choice = self._sampling(step.producing).run(logits[step.sample_rows])
            generations, going_on = self._take(batch, step.producing, choice)
            ended = {id(s) for s in step.producing} - {id(s) for s in going_on}
            live = [s for s in batch.sequences if id(s) not in ended]
        share_budget(live, self.max_prefill_tokens)
        after: Batch | None = batch if len(live) == len(batch.sequences) else None
        if after is None and live:
            after = make_batch(batch.id, live, self._block_size)
        return Stepped(generations, after, forwarded - start, time.perf_counter_ns() - forwarded)

    def _forward(
        self, inputs: ForwardInputs, written: torch.Tensor, history: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        self.guard.forget(written)
        logits = self._adapter.step(inputs, self.pool)
        self.guard.remember(written, history())
        return logits

    def _take(
        self, batch: Batch, producing: Items[Sequence], choice: Choice
    ) -> tuple[list[Generation], list[Sequence]]:
        """Give each request its token. Returns what to report, and who goes on."""
        generations = []
        live = []
        rank, world = self._config.rank, self._config.world_size
        for row, sequence in enumerate(producing):
            if row in choice.failed:
                generation = self._fail(batch, sequence, choice.failed[row])
            else:
                generation = take_token(
                    self._adapter.tokenizer, sequence, choice.ids[row], choice.logprobs[row], choice.tops.get(row)
                )
            if generation.generated_text is None:
                live.append(sequence)
            if sequence.request.id % world == rank:
                generations.append(generation)
        return generations, live

    def _fail(self, batch: Batch, sequence: Sequence, reason: str) -> Generation:
        self._counter("requests_failed", 1)
        message = f"request {sequence.request.id}: after {sequence.stopping.count} tokens: {reason}"
        if len(batch.sequences) == 1:
            raise GenerationError(message)
        log.error("%s; it ends here, the rest of batch %d goes on", message, batch.id)
        text = sequence.detokenizer.final_text()
        end_id = min(self._adapter.eos_token_ids, default=0)
        return ended_early(sequence.request.id, end_id, text, sequence.stopping.count)


def _score_prompts(step: RaggedStep, logits: torch.Tensor) -> None:
    """Collect the logprobs of the prompt tokens that follow the ones just fed."""
    for sequence, rows in step.prompt_rows:
        assert sequence.prompt_logprobs is not None
        start = sequence.cache_len + 1
        following = torch.tensor(sequence.ids[start : start + len(rows)][: sequence.prompt_length - start])
        if len(following):
            following = following.to(logits.device, non_blocking=True)
            logprobs = logits[rows.start : rows.start + len(following)].log_softmax(-1)
            sequence.prompt_logprobs += logprobs.gather(1, following.unsqueeze(1)).squeeze(1).tolist()
