"""One model as the door serves it: tokenizer, limits, queue, blocks and handlers, made together and never changed.

Choice: whatever depends on the model hangs together in one value, and a request takes that value once, before its body
is read. Prevents: a prompt rendered by one model's template, cut by another's tokenizer and sent to a third. Rejected:
swapping the parts of a shared state one after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.http import Handler
from deepseek_tgi.router.infer import Infer, Permits
from deepseek_tgi.router.liveness import Liveness
from deepseek_tgi.router.metrics import RouterMetrics
from deepseek_tgi.router.model_files import ModelFiles
from deepseek_tgi.router.routes import model_table
from deepseek_tgi.router.scheduler import BatchPolicy, Scheduler
from deepseek_tgi.router.spans import Spans
from deepseek_tgi.router.startup import ShardFacts
from deepseek_tgi.router.state import RouterState
from deepseek_tgi.router.traffic import Traffic
from deepseek_tgi.router.validation import Limits, Validator


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """What answers for one model. `traffic` counts the requests that have taken it, whatever they do with it."""

    generation: int | None
    state: RouterState
    scheduler: Scheduler
    handlers: Mapping[tuple[str, str], Handler]
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def name(self) -> str:
        """The name clients see."""
        return self.state.config.model_id

    def close(self) -> None:
        """Stop the validation threads."""
        self.state.infer.validator.close()


@dataclass(frozen=True, slots=True)
class Shared:
    """What all models of a door have in common."""

    config: RouterConfig
    shards: ShardClient
    metrics: RouterMetrics
    liveness: Liveness
    permits: Permits
    traffic: Traffic
    spans: Spans
    owner: Owner

    @classmethod
    def made_for(cls, config: RouterConfig, shards: ShardClient, facts: ShardFacts, owner: Owner) -> Shared:
        """The parts of a new door; its histograms take their edges from the first model's limits."""
        metrics = RouterMetrics(facts.max_input_tokens, facts.max_total_tokens)
        permits = Permits(config.max_concurrent_requests, metrics)
        return cls(config, shards, metrics, Liveness(shards), permits, Traffic(), shards.spans, owner)

    def model(self, config: RouterConfig, facts: ShardFacts, files: ModelFiles, generation: int | None) -> ServedModel:
        """A model that the shards hold as `generation` (None: the only one they have); `config` names it."""
        limits = Limits(
            max_best_of=config.max_best_of,
            max_stop_sequences=config.max_stop_sequences,
            max_top_n_tokens=config.max_top_n_tokens,
            max_input_tokens=facts.max_input_tokens,
            max_total_tokens=facts.max_total_tokens,
            grammars=not config.disable_grammar_support,
        )
        policy = BatchPolicy(config.waiting_served_ratio, config.max_waiting_tokens, config.max_batch_size)
        shards = self.shards.of_generation(generation)
        scheduler = Scheduler(shards, facts, policy, self.metrics, self.liveness)
        validator = Validator(files.tokenizer, limits, config.validation_workers)
        state = RouterState(
            config=config,
            limits=limits,
            infer=Infer(validator, scheduler, self.permits, self.metrics),
            liveness=self.liveness,
            metrics=self.metrics,
            traffic=self.traffic,
            spans=self.spans,
            owner=self.owner,
            template=files.template,
            model_sha=files.sha,
            pipeline_tag=files.pipeline_tag,
        )
        return ServedModel(generation, state, scheduler, model_table(state))


async def idle(model: ServedModel, seconds: float | None) -> bool:
    """Wait until nobody uses the model any more; false if that takes longer (None: however long it takes)."""
    deadline = math.inf if seconds is None else asyncio.get_running_loop().time() + seconds
    if not await model.traffic.idle_within(seconds):
        return False
    # Its last requests may have left early: the step that they were in must end, and its batch be dropped.
    while not model.scheduler.idle:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def renamed(config: RouterConfig, source: str, name: str, revision: str | None) -> RouterConfig:
    """`config` for another model: its files are at `source`, clients see `name`."""
    return dataclasses.replace(
        config, tokenizer_name=source, served_model_id=name, revision=revision, tokenizer_config_path=None
    )
