"""The router's own judgement: its event loop, each shard's stream of states, and generations that failed.

A router whose shard is degraded, silent or gone is so itself; what a shard cannot tell (TGI's own tells nothing) shows
in generations: after one that failed, one token is generated in the background, and until that succeeds the router is
not ready.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from deepseek_tgi.probes.checks import Check
from deepseek_tgi.probes.loop_pulse import watch_loop
from deepseek_tgi.probes.monitor import Monitor, MonitorLimits
from deepseek_tgi.probes.owner import Increment, Owner, Snapshot
from deepseek_tgi.probes.publishing import Follower, trace_change
from deepseek_tgi.probes.state import State
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.liveness import DUMMY_TIMEOUT_S, Liveness
from deepseek_tgi.router.metrics import RouterMetrics
from deepseek_tgi.router.shard_watch import ShardWatch
from deepseek_tgi.router.spans import Spans

GENERATION = "generation"
PROOF_PERIOD_S = 0.5
SILENCE_S = 0.7
"""Several heartbeats of a shard that did not come."""


class RouterHealth:
    """Watches from `start` to `stop`; made on the event loop. `failed` is set once the router cannot go on."""

    def __init__(self, owner: Owner, shards: ShardClient, liveness: Liveness, stall_limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._liveness = liveness
        self._watches = [ShardWatch(rank, channel, self._look) for rank, channel in enumerate(shards.channels)]
        checks = (Check(GENERATION, self._prove, PROOF_PERIOD_S, DUMMY_TIMEOUT_S, only_when_bad=True),)
        limits = MonitorLimits(stall_limit_s=stall_limit_s, motionless_s=SILENCE_S)
        self._monitor = Monitor(owner, (watch_loop(), *self._watches), checks, limits)
        self._tasks: list[asyncio.Task[None]] = []
        liveness.on_suspect = lambda: self._monitor.suspect(GENERATION)

    def start(self) -> None:
        """Watch from now on."""
        self._tasks = [asyncio.create_task(watch.run(), name="shard watch") for watch in self._watches]
        self._monitor.start()

    async def stop(self) -> None:
        """Watch no more."""
        self._monitor.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _look(self) -> None:
        self._monitor.tick()

    def _prove(self) -> Future[None] | None:
        if self._loop.is_closed():
            return None
        return asyncio.run_coroutine_threadsafe(self._liveness.prove(), self._loop)


class StatePublisher:
    """Shows an owner's changes in metrics and traces, and says when it has failed; lives on the event loop."""

    def __init__(self, owner: Owner, metrics: RouterMetrics, spans: Spans) -> None:
        self.failed = asyncio.Event()
        self._metrics = metrics
        self._spans = spans
        self._follower = Follower(owner, self._show, self._changed)

    def close(self) -> None:
        """Show no more."""
        self._follower.close()

    def _show(self, snapshot: Snapshot) -> None:
        for each in State:
            self._metrics.gauge("deepseek_tgi_state", each is snapshot.state, f'state="{each.value}"')

    def _changed(self, increment: Increment) -> None:
        before, after = increment.before, increment.after
        if after.state is before:
            return
        self._show(after)
        label = f'before="{before.value}",after="{after.state.value}"'
        self._metrics.count("deepseek_tgi_state_transitions", label=label)
        if self._spans.tracer is not None:
            trace_change(self._spans.tracer, increment)
        if after.state is State.FAILED:
            self.failed.set()
