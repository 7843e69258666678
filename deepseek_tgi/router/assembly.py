"""Putting the door together: every part gets what it needs here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_tgi.router.app import RouterApp
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.infer import Infer, Permits
from deepseek_tgi.router.liveness import Liveness
from deepseek_tgi.router.metrics import RouterMetrics
from deepseek_tgi.router.model_files import ModelFiles
from deepseek_tgi.router.routes import route_table
from deepseek_tgi.router.scheduler import BatchPolicy, Scheduler
from deepseek_tgi.router.startup import ShardFacts
from deepseek_tgi.router.state import RouterState
from deepseek_tgi.router.traffic import Traffic
from deepseek_tgi.router.validation import Limits, Validator


@dataclass(frozen=True, slots=True)
class Router:
    """The parts that a process (or a test) starts and stops; `scheduler.run()` must be kept running."""

    app: RouterApp
    scheduler: Scheduler
    state: RouterState

    def close(self) -> None:
        """Stop the validation threads."""
        self.state.infer.validator.close()


def assemble(config: RouterConfig, shards: ShardClient, facts: ShardFacts, files: ModelFiles) -> Router:
    """Build the door for shards that were introduced already."""
    limits = Limits(
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_input_tokens=facts.max_input_tokens,
        max_total_tokens=facts.max_total_tokens,
        grammars=not config.disable_grammar_support,
    )
    metrics = RouterMetrics(facts.max_input_tokens, facts.max_total_tokens)
    liveness = Liveness(shards)
    policy = BatchPolicy(config.waiting_served_ratio, config.max_waiting_tokens, config.max_batch_size)
    scheduler = Scheduler(shards, facts, policy, metrics, liveness)
    permits = Permits(config.max_concurrent_requests, metrics)
    validator = Validator(files.tokenizer, limits, config.validation_workers)
    infer = Infer(validator, scheduler, permits, metrics)
    state = RouterState(
        config=config,
        limits=limits,
        infer=infer,
        liveness=liveness,
        metrics=metrics,
        traffic=Traffic(),
        spans=shards.spans,
        template=files.template,
        model_sha=files.sha,
        pipeline_tag=files.pipeline_tag,
    )
    return Router(RouterApp(state, route_table(state)), scheduler, state)
